"""What holds for every architecture: with our sampler it is diffusers' pipeline, and it is careful with memory."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import AutoencoderTiny, DiffusionPipeline, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from nano import (
    ATTENTION,
    PROMPTS,
    LevelsOf,
    load_nano,
    lora_config,
    prompts_of,
    random_state,
    relative_error,
    save_preview_decoder,
)
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.names import TRAINED
from solrl_lightning.policies import bf16, lora, replica
from solrl_lightning.policies.flux2 import Flux2
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.qwen_image import QwenImage
from solrl_lightning.policies.sana import Sana
from solrl_lightning.policies.wan import Wan
from solrl_lightning.policies.z_image import ZImage
from solrl_lightning.quantization import QuantizationRule, resolve
from solrl_lightning.sampling import integrate
from solrl_lightning.training.full import FullTransformer
from solrl_lightning.training.transformers import AdaptedTransformer, replicate

SEEDS = torch.tensor([3, 4, 2**32 - 1])
STEPS = 4


@pytest.fixture(scope="module")
def model(architecture: str, folder: str) -> PipelineAdapter:
    """In float32, so that rounding hides nothing; no test changes it."""
    return load_nano(architecture, folder, dtypes={"default": "float32"})


@pytest.fixture
def theirs(model: PipelineAdapter, folder: str) -> DiffusionPipeline:
    """The same pipeline as diffusers loads it, with the scheduler of the published rollouts."""
    pipeline = model.pipeline_class.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    if isinstance(model, Sana):  # whose own is a multistep scheduler with another shift
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler()
    if isinstance(model, Wan):  # whose own is another solver
        pipeline.scheduler = LevelsOf(model)
    return pipeline


def sample(
    model: PipelineAdapter,
    sigmas: Tensor | None = None,
    solver: str = "euler",
    transformer: nn.Module | None = None,
    level: Callable[[Tensor], Tensor] = lambda sigma: sigma,
) -> Tensor:
    """Our latents; ``level`` is what the transformer is told about sigma."""
    conditioning = model.encode(prompts_of(PROMPTS))
    with torch.no_grad():
        return integrate(
            lambda x, sigma: model.velocity(transformer or model.transformer, x, level(sigma), conditioning),
            model.noise(SEEDS),
            model.sigmas(STEPS) if sigmas is None else sigmas,
            solver,
        )


def paint(
    model: PipelineAdapter, pipeline: DiffusionPipeline, texts: list[str] | None = None, **options: Any
) -> Tensor:
    """The diffusers pipeline's images (or latents) of our noise, and of our embeddings unless it gets ``texts``."""
    if texts is None:
        names = {"pooled": "pooled_prompt_embeds", "prompt_mask": "prompt_attention_mask"}
        options |= {names.get(name, name): value for name, value in model.encode(prompts_of(PROMPTS)).items()}
    if isinstance(model, Sana):
        options |= {"use_resolution_binning": False, "complex_human_instruction": None}
        if isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler):
            options |= {"sigmas": model.sigmas(STEPS)[:-1].tolist()}
    options = {"output_type": "latent", "num_inference_steps": STEPS} | options
    if isinstance(model, ZImage):
        options |= {"guidance_scale": 0.0}  # which is 1 more
        if texts is None:
            options["prompt_embeds"] = list(options["prompt_embeds"])  # of equal lengths
    else:
        options |= {"true_cfg_scale" if isinstance(model, QwenImage) else "guidance_scale": 1.0}
    options |= {"height": 32, "width": 32, "max_sequence_length": model.max_sequence_length}
    if isinstance(model, Wan):
        options |= {"num_frames": 5}
    return pipeline(prompt=texts and list(texts), latents=model.noise(SEEDS), **options)[0]


def as_painted(model: PipelineAdapter, latents: Tensor) -> Tensor:
    """Our latents as the pipeline returns them: FLUX.2's are unscaled already."""
    return model.unscale_latents(latents, model.pipeline.vae) if isinstance(model, Flux2) else latents


def test_images_match_the_diffusers_pipeline(
    model: PipelineAdapter, theirs: DiffusionPipeline, architecture: str, folder: str
) -> None:
    latents = sample(model)
    painted = as_painted(model, latents)
    assert torch.equal(painted, paint(model, theirs, PROMPTS))
    expected = paint(model, theirs, output_type="pt")
    assert expected.std() > 0.05  # not a flat picture
    # Our autoencoder gets the batch in parts and in another memory layout, so its sums have another order.
    torch.testing.assert_close(model.decode(latents), expected, rtol=0, atol=1e-5)

    rounded = load_nano(architecture, folder)
    theirs.transformer.to(torch.bfloat16)
    in_bfloat16 = as_painted(model, sample(rounded))
    # FLUX.1's and SD3's pipelines also round their latents after each step; ours stay in float32. SANA's do not round
    # them, so on a CPU with BF16 units, where both run the same kernels, they are equal.
    assert relative_error(in_bfloat16, paint(rounded, theirs)) < 2**-7
    assert 0 < relative_error(in_bfloat16, painted) < 2**-5


@pytest.mark.parametrize("architecture", ["flux1", "sd3", "sana", "z_image"], indirect=True, scope="session")
def test_previews_match_the_diffusers_pipeline_with_the_tiny_autoencoder(
    model: PipelineAdapter, theirs: DiffusionPipeline, architecture: str, folder: str, tmp_path: Path
) -> None:
    channels, compression = theirs.vae.config.latent_channels, theirs.vae_scale_factor
    tiny = save_preview_decoder(tmp_path, channels=channels, compression=compression)
    previewing = load_nano(architecture, folder, preview_decoder=tiny)
    latents = sample(model)
    previews = previewing.preview(latents)
    assert previews.shape == (3, 3, 32, 32) and previews.dtype == torch.float32
    theirs.vae = AutoencoderTiny.from_pretrained(tiny)
    expected = paint(model, theirs, output_type="pt")
    assert expected.std() > 0.1
    torch.testing.assert_close(previews, expected, rtol=0, atol=1e-5)
    assert torch.equal(previewing.decode(latents), model.decode(latents))  # still by the model's own


# The pipelines of Qwen-Image and Z-Image give their scheduler noise levels, which that one does not take.
@pytest.mark.parametrize("architecture", ["flux1", "flux2", "sana", "sd3", "wan"], indirect=True, scope="session")
# numpy asks for an argument that torch's tensors do not take yet
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_dpm2_matches_the_multistep_scheduler_of_diffusers(
    model: PipelineAdapter, theirs: DiffusionPipeline, architecture: str
) -> None:
    theirs.scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
        use_dynamic_shifting=architecture in ("flux1", "flux2"),
        time_shift_type="exponential",
    )
    expected = paint(model, theirs, num_inference_steps=6)
    sigmas, timesteps = theirs.scheduler.sigmas, theirs.scheduler.timesteps
    levels = {float(sigma): timestep / 1000 for sigma, timestep in zip(sigmas, timesteps, strict=False)}  # whole ones
    latents = sample(model, sigmas, "dpm2", level=lambda sigma: levels[float(sigma)])
    torch.testing.assert_close(as_painted(model, latents), expected, rtol=0, atol=1e-4)
    assert relative_error(latents, sample(model, sigmas, "euler")) > 1e-3


def test_diffusers_paints_the_merged_replicas_images_with_the_saved_lora(
    model: PipelineAdapter, theirs: DiffusionPipeline, architecture: str, folder: str, tmp_path: Path
) -> None:
    adapted = load_nano(architecture, folder)
    adapted.transformer.float()
    merged = replica.clone_sharing_weights(adapted.transformer)
    # The fused projection of single blocks, and convolutions of one pixel and of several.
    # FLUX.2's attn.to_out is a layer in single blocks, and a list of modules in others.
    others = {"flux2": ("to_qkv_mlp_proj", "attn.to_out"), "sana": ("conv_inverted", "conv_point", "patch_embed.proj")}
    config = lora_config(rank=4, alpha=12, targets=(*ATTENTION, *others.get(architecture, ())))
    trained = AdaptedTransformer(adapted.transformer, config, seed=0)
    layers = trained.lora_layers
    state = random_state(lora.adapter_state(layers, TRAINED), seed=6)
    replica.untie_parameters(merged, [f"{name}.weight" for name in layers])
    replica.write_parameters(merged, lora.merged_weights(layers, state))
    adapted.save_lora(tmp_path, state, trained.config)
    again = lora.read_lora(tmp_path, adapted.transformer, layers, adapted.pipeline_class)
    assert all(relative_error(again[name], value) < 1e-6 for name, value in state.items())
    images, without = (model.decode(sample(model, transformer=module)) for module in (merged, None))
    theirs.load_lora_weights(tmp_path)
    torch.testing.assert_close(images, paint(model, theirs, output_type="pt"), rtol=0, atol=1e-4)
    assert (images - without).abs().max() > 0.02


@pytest.mark.parametrize("architecture", ["flux1", "sana", "wan", "z_image"], indirect=True, scope="session")
def test_gradients_are_the_same_with_checkpointing_and_without(architecture: str, folder: str) -> None:
    gradients = {}
    for checkpointing in (False, True, "selective"):
        model = load_nano(architecture, folder, gradient_checkpointing=checkpointing)
        layers = lora.add_adapters(model.transformer.train(), lora_config(), seed=0)
        lora.load_state(layers, TRAINED, random_state(lora.adapter_state(layers, TRAINED), seed=1))
        blocks = [b for part in model.transformer.children() if isinstance(part, nn.ModuleList) for b in part]
        calls = [counted(block) for block in blocks]
        velocity = model.velocity(
            model.transformer, model.noise(SEEDS), torch.tensor(0.5), model.encode(prompts_of(PROMPTS))
        )
        velocity.square().mean().backward()
        every = {False: 3, True: 1, "selective": 2}[checkpointing]
        assert [len(called) for called in calls] == [1 + (n % every == 0 and every <= 2) for n in range(len(calls))]
        gradients[checkpointing] = {
            name: parameter.grad for name, parameter in model.transformer.named_parameters() if parameter.requires_grad
        }
    for name, value in gradients[False].items():
        assert torch.equal(value, gradients[True][name]) and torch.equal(value, gradients["selective"][name])
    assert any(value.any() for value in gradients[False].values())


@pytest.mark.parametrize("train", ["lora", "full"])
def test_every_trained_weight_gets_a_gradient(architecture: str, folder: str, train: str) -> None:
    """DDP ends with an error otherwise; with a LoRA on every linear layer."""
    model = load_nano(architecture, folder)
    layers = [name for name, module in model.transformer.named_modules() if isinstance(module, nn.Linear)]
    adapted = partial(AdaptedTransformer, config=lora_config(targets=layers), seed=0)
    backend, rule = resolve("bf16", "auto", model.device), QuantizationRule([], {})
    eager = dict(compile_replicas=False, compile_policy=False, with_shadow=False)
    makers = {"lora": adapted, "full": FullTransformer}
    trained = replicate(model, makers[train], 2, backend=backend, rule=rule, **eager).trained
    x, conditioning = model.noise(SEEDS), model.encode(prompts_of(PROMPTS))
    with torch.no_grad(), trained.old() as transformer:  # after which the same weights are trained
        model.velocity(transformer, x, torch.tensor(0.5), conditioning)
    with trained.current() as transformer:
        model.velocity(transformer, x, torch.tensor(0.5), conditioning).square().mean().backward()
    weights = {name: weight for name, weight in trained.weights.named_parameters() if weight.requires_grad}
    assert [name for name, weight in weights.items() if weight.grad is None] == []
    unused = [name for name in trained.state("default") if any(layer in name for layer in model.unused_layers)]
    assert len(weights) + len(unused) == len(trained.state("default")) and len(weights) > len(unused)


def counted(module: nn.Module) -> list[None]:
    calls: list[None] = []
    module.register_forward_pre_hook(lambda module, inputs: calls.append(None))
    return calls


def test_one_sigma_for_all_rows_equals_a_sigma_per_row(model: PipelineAdapter) -> None:
    conditioning, x = model.encode(prompts_of(PROMPTS)), model.noise(SEEDS)
    with torch.no_grad():
        per_row = model.velocity(model.transformer, x, torch.tensor([0.9, 0.5, 0.1]), conditioning)
        for row, sigma in enumerate((0.9, 0.5, 0.1)):
            common = model.velocity(model.transformer, x, torch.tensor(sigma), conditioning)
            torch.testing.assert_close(per_row[row], common[row], rtol=0, atol=1e-5)
        other = model.velocity(model.transformer, x, torch.tensor(0.9), conditioning)
    assert per_row.dtype == torch.float32 and relative_error(per_row[2], other[2]) > 1e-3


def test_embeddings_do_not_depend_on_the_other_prompts(model: PipelineAdapter) -> None:
    together = model.encode(prompts_of(PROMPTS))
    for row, prompt in enumerate(PROMPTS):
        for name, value in model.encode(prompts_of([prompt])).items():
            torch.testing.assert_close(value[0], together[name][row], rtol=0, atol=1e-5)
    assert relative_error(together["prompt_embeds"][0], together["prompt_embeds"][1]) > 0.05
    again = model.encode(prompts_of([PROMPTS[1], PROMPTS[0], PROMPTS[1]]))["prompt_embeds"]  # a prompt may come twice
    assert torch.equal(again[0], again[2])
    torch.testing.assert_close(again[:2], together["prompt_embeds"][:2].flip(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ["flux1", "sana", "wan"], indirect=True, scope="session")
def test_invalid_resolution_and_dtype_raise(architecture: str, folder: str) -> None:
    with pytest.raises(UserError, match="resolution=36 is invalid: it must be .* of 8, .* Set model.resolution=32."):
        load_nano(architecture, folder, resolution=36)
    with pytest.raises(UserError, match="model.dtypes.vae must be bfloat16, float16 or float32; got half an int"):
        load_nano(architecture, folder, dtypes={"vae": "half an int", "default": "float32"})
    with pytest.raises(UserError, match="model.dtypes.default must be bfloat16, float16 or float32; got nothing"):
        load_nano(architecture, folder, dtypes={"transformer": "bfloat16", "vae": "float32"})
    components = "must be left out: the components of .*Pipeline are default, .*transformer"
    with pytest.raises(UserError, match=f"model.dtypes.text {components}"):
        load_nano(architecture, folder, dtypes={"default": "bfloat16", "text": "bfloat16"})


def is_kept_in_float32(module: nn.Module, parameter: str) -> bool:
    """Whether diffusers does so, as with Wan's modulation."""
    return any(part in parameter.split(".") for part in getattr(module, "_keep_in_fp32_modules", None) or ())


def test_components_and_embeddings_have_the_configured_dtypes(architecture: str, folder: str) -> None:
    model = load_nano(architecture, folder, dtypes={"vae": "float32", "default": "bfloat16"})
    modules = {name: part for name, part in model.pipeline.components.items() if isinstance(part, nn.Module)}
    for name, module in modules.items():
        parts = {key: value for key, value in module.named_parameters() if not is_kept_in_float32(module, key)}
        assert {value.dtype for value in parts.values()} == {torch.float32 if name == "vae" else torch.bfloat16}
        assert not any(parameter.requires_grad for parameter in module.parameters())
    assert len(modules) >= 3
    assert model.decode(model.noise(SEEDS)).isfinite().all()
    masks = {"prompt_mask": torch.int64, "prompt_embeds_mask": torch.bool}
    for dtype in (torch.bfloat16, torch.float32):
        model.transformer.to(dtype)
        dtypes = {name: value.dtype for name, value in model.encode(prompts_of(PROMPTS[:1])).items()}
        assert "prompt_embeds" in dtypes and dtypes == {name: masks.get(name, dtype) for name in dtypes}


# Memory


def test_the_decoder_in_bfloat16_has_no_activation_in_float32(
    model: PipelineAdapter, architecture: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16, "has_fast_bf16_products", lambda: True)
    latents, dtypes = model.noise(SEEDS), set()

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.GroupNorm | nn.Conv2d | nn.Conv3d):
            dtypes.add(output.dtype)

    whole = model.decode(latents)
    with nn.modules.module.register_module_forward_hook(record):
        images = model.decode_in_bf16(latents)
    assert dtypes == {torch.bfloat16} and model.pipeline.vae.dtype == torch.float32
    assert images.dtype == torch.float32 and (images - whole).abs().mean() < 0.02


def limited(model: PipelineAdapter, images: int, side: int) -> list[tuple[int, int]]:
    """Let the decoder run out of memory above these sizes; return the sizes of its inputs."""
    sizes: list[tuple[int, int]] = []

    def check(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes.append((inputs[0].shape[0], inputs[0].shape[-1]))
        if sizes[-1][0] > images or sizes[-1][1] > side:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.pipeline.vae.decoder.register_forward_pre_hook(check)
    return sizes


@pytest.mark.parametrize("architecture", ["flux1", "wan"], indirect=True, scope="session")
def test_decoding_halves_its_batch_when_memory_runs_out(
    model: PipelineAdapter, architecture: str, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    tight = load_nano(architecture, folder, decode_batch=8)
    calls = 2 if architecture == "wan" else 1  # of the decoder: it decodes each latent frame alone
    sizes, latents = limited(tight, images=2, side=99), tight.noise(torch.arange(5))
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(tight.decode(latents), model.decode(latents), rtol=0, atol=1e-5)
    whole = [images for images in (2, 2, 1) for _ in range(calls)]
    assert [images for images, _ in sizes] == [5, 5, 4, 4, *whole]  # each size that fails, again with an empty cache
    assert caplog.text.count("ran out of memory") == 2 and "model.decode_batch=2 from now on" in caplog.text
    sizes.clear()
    tight.decode(latents)
    assert [images for images, _ in sizes] == whole


def test_image_that_does_not_fit_is_decoded_in_tiles(model: PipelineAdapter, architecture: str, folder: str) -> None:
    side = 4 if architecture == "sana" else 8  # of the latents
    tight = load_nano(architecture, folder, decode_batch=2)
    sizes, latents = limited(tight, images=1, side=side // 2), model.noise(SEEDS)
    tiled, whole = tight.decode(latents), model.decode(latents)
    assert tiled.shape == whole.shape and tiled.isfinite().all()
    assert sizes[:4] == [(2, side)] * 2 + [(1, side)] * 2 and max(sizes[4:]) == (1, side // 2)
    for shift in (8, 16, 24):  # every tile is in its place
        assert relative_error(tiled, whole) < relative_error(tiled.roll(shift, -1), whole)
    limited(tight, images=0, side=0)
    with pytest.raises(torch.OutOfMemoryError):
        tight.decode(latents)


def test_saved_configurations_name_the_class_of_diffusers(model: PipelineAdapter) -> None:
    cls = type(model.transformer)
    assert getattr(diffusers, cls.__name__) in cls.__mro__
