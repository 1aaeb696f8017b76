"""What is each architecture's own: layout and statistics of the latents, masks; test_pipelines.py has the rest."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, QwenImagePipeline, SanaTransformer2DModel, ZImagePipeline
from nano import PROMPTS, build_nano_sana, load_model, load_nano, prompts_of, relative_error
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from solrl_lightning.errors import UserError
from solrl_lightning.policies.bf16 import BF16Linear, has_fast_bf16_products
from solrl_lightning.policies.compilation import compile_blocks
from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.qwen_image import with_conditional_norm
from solrl_lightning.sampling import integrate
from solrl_lightning.seeds import noise
from tests.sigmas import flux_sigmas, shifted_sigmas

FolderOf = Callable[[str], str]
SEEDS = torch.tensor([3, 4, 2**32 - 1])
STEPS, GUIDANCE = 4, 3.5
LATENTS = {"flux1": (8, 8, 8), "sd3": (16, 8, 8), "sana": (8, 4, 4), "flux2": (32, 4, 4), "qwen_image": (16, 8, 8)}
LATENTS |= {"z_image": (16, 8, 8), "wan": (16, 2, 8, 8)}
TEXTS = ["a red circle above a blue square", "a circle", "a green triangle"]
FLOAT32 = {"default": "float32"}


@pytest.fixture(scope="module")
def model(architecture: str, folder: str) -> PipelineAdapter:
    return load_nano(architecture, folder)


def sample(model: PipelineAdapter, conditioning: Conditioning, steps: int = STEPS) -> Tensor:
    with torch.no_grad():
        return integrate(
            lambda x, sigma: model.velocity(model.transformer, x, sigma, conditioning),
            model.noise(SEEDS),
            model.sigmas(steps),
        )


def packed(spatial: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H/2 * W/2, 4 C]: a token is a 2 x 2 patch, channel by channel, row by row."""
    batch, channels, height, width = spatial.shape
    patches = spatial.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return torch.einsum("bcyixj->byxcij", patches).reshape(batch, height // 2 * (width // 2), channels * 4)


def unpatched(latents: Tensor) -> Tensor:
    """[B, 4 C, H, W] -> [B, C, 2 H, 2 W]: of a channel's four, rows before columns."""
    batch, channels, height, width = latents.shape
    patches = latents.reshape(batch, channels // 4, 2, 2, height, width)
    return torch.einsum("bcijyx->bcyixj", patches).reshape(batch, channels // 4, 2 * height, 2 * width)


def autoencoder_input(architecture: str, vae: nn.Module, latents: Tensor) -> Tensor:
    """Latents [B, C, ...] on the scale and in the layout of the autoencoder."""
    if architecture == "flux2":
        mean, std = vae.bn.running_mean, (vae.bn.running_var + 1e-4).sqrt()
        return unpatched(latents * std[:, None, None] + mean[:, None, None])
    if architecture in ("qwen_image", "wan"):
        video = latents if architecture == "wan" else latents[:, :, None]  # or one of one frame
        mean, std = (torch.tensor(vae.config[name])[:, None, None, None] for name in ("latents_mean", "latents_std"))
        return video * std + mean
    of_flux1, of_sd3, of_sana = (0.3611, 0.1159), (1.5305, 0.0609), (0.41407, 0.0)
    scales = {"flux1": of_flux1, "sd3": of_sd3, "sana": of_sana, "z_image": of_flux1}
    scale, shift = scales[architecture]
    return latents / scale + shift


def test_noise_layout_and_decode(architecture: str, model: PipelineAdapter) -> None:
    spatial, vae = noise(SEEDS, LATENTS[architecture]), model.pipeline.vae.float()
    latents = packed(spatial) if architecture in ("flux1", "qwen_image") else spatial
    assert model.latent_shape == latents.shape[1:] and torch.equal(model.noise(SEEDS), latents)
    with torch.no_grad():
        decoded = vae.decode(autoencoder_input(architecture, vae, spatial)).sample
    frames = {"qwen_image": (1,), "wan": (5,)}.get(architecture, ())
    assert decoded.shape == (3, 3, *frames, 32, 32)
    images = decoded.transpose(1, 2) if architecture == "wan" else decoded.reshape(3, 3, 32, 32)
    expected = (images / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(model.decode(latents), expected, rtol=0, atol=1e-5)
    if architecture not in ("qwen_image", "wan"):  # whose decoders normalise the latents
        beyond = model.decode(1e3 * latents)
        assert beyond.min() == 0 and beyond.max() == 1


def test_flow_shift_of_sana(folder_of: FolderOf) -> None:
    shifted = load_nano("sana", folder_of("sana"), flow_shift=3.0)
    torch.testing.assert_close(shifted.sigmas(10), shifted_sigmas(10, 3.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "mask_name", "lengths"),
    [
        ("sana", "prompt_mask", [len(text) + 1 for text in TEXTS]),  # nano's tokens are letters
        ("qwen_image", "prompt_embeds_mask", [len(text.split()) + 5 for text in TEXTS]),  # five of the template
        ("z_image", "prompt_embeds_mask", [len(text.split()) + 8 for text in TEXTS]),  # eight of it
    ],
)
def test_padding_has_no_influence(folder_of: FolderOf, architecture: str, mask_name: str, lengths: list[int]) -> None:
    model = load_nano(architecture, folder_of(architecture), max_sequence_length=40, dtypes=FLOAT32)
    conditioning, x, sigma = model.encode(prompts_of(TEXTS)), model.noise(SEEDS), torch.tensor(0.6)
    mask = conditioning[mask_name].bool()
    assert mask.sum(1).tolist() == lengths
    with torch.no_grad():
        expected = model.velocity(model.transformer, x, sigma, conditioning)
        for part, changes in ((~mask, False), (mask, True)):
            embeds = conditioning["prompt_embeds"].clone()
            embeds[part] += torch.randn(64)  # a constant would vanish in the norm
            velocity = model.velocity(model.transformer, x, sigma, conditioning | {"prompt_embeds": embeds})
            assert bool((velocity - expected).abs().max() > 1e-3) == changes


# FLUX.1


def test_flux1_dev_with_guidance_and_shift_paints_as_the_diffusers_pipeline(dev_folder: str) -> None:
    model = load_model(dev_folder, guidance=GUIDANCE, dtypes=FLOAT32)
    expected = flux_sigmas(7, image_tokens=16, base_tokens=8, max_tokens=64)
    torch.testing.assert_close(model.sigmas(7), expected, rtol=0, atol=1e-6)
    pipeline = FluxPipeline.from_pretrained(dev_folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    options = dict(num_inference_steps=STEPS, guidance_scale=GUIDANCE, height=32, width=32, max_sequence_length=10)
    latents, images = (
        pipeline(PROMPTS, latents=model.noise(SEEDS), output_type=kind, **options).images for kind in ("latent", "pt")
    )
    sampled = sample(model, model.encode(prompts_of(PROMPTS)))
    assert torch.equal(sampled, latents)
    torch.testing.assert_close(model.decode(sampled), images, rtol=0, atol=1e-5)
    weak = load_model(dev_folder, guidance=1.0, dtypes=FLOAT32)
    assert relative_error(sample(weak, model.encode(prompts_of(PROMPTS))), sampled) > 0.02


def test_flux1_velocities_are_float32_from_a_bfloat16_transformer(nano_folder: str) -> None:
    model = load_model(nano_folder)
    velocity = model.velocity(
        model.transformer, model.noise(SEEDS), torch.tensor(0.5), model.encode(prompts_of(PROMPTS))
    )
    assert velocity.dtype == torch.float32 and velocity.shape == (3, 16, 32)
    assert {parameter.dtype for parameter in model.transformer.parameters()} == {torch.bfloat16}
    linears = {type(module) for module in model.transformer.modules() if isinstance(module, nn.Linear)}
    assert linears == {nn.Linear if has_fast_bf16_products() else BF16Linear}


# SANA


def test_sana_drops_a_learned_sigma_and_scales_timesteps(tmp_path: Path) -> None:
    pipeline = build_nano_sana()
    with torch.random.fork_rng(devices=[]):
        options = {name: value for name, value in pipeline.transformer.config.items() if not name.startswith("_")}
        transformer = SanaTransformer2DModel(**options | {"out_channels": 16, "timestep_scale": 0.5})
    pipeline.register_modules(transformer=transformer)
    pipeline.save_pretrained(tmp_path)
    model = load_nano("sana", str(tmp_path), dtypes=FLOAT32)
    conditioning, x = model.encode(prompts_of(PROMPTS)), model.noise(SEEDS)
    embeds = dict(encoder_hidden_states=conditioning["prompt_embeds"])
    embeds |= dict(encoder_attention_mask=conditioning["prompt_mask"])
    with torch.no_grad():
        velocity = model.velocity(model.transformer, x, torch.tensor(0.8), conditioning)
        whole = model.transformer(x, timestep=torch.full((3,), 400.0), **embeds).sample
    assert whole.shape == (3, 16, 4, 4) and torch.equal(velocity, whole[:, :8])


# Qwen-Image


def test_qwen_image_prompts_of_different_lengths_are_stored_unpadded_and_paint_as_diffusers(
    folder_of: FolderOf, tmp_path: Path
) -> None:
    folder, lengths = folder_of("qwen_image"), [7 + 5, 2 + 5, 3 + 5]
    model = load_nano("qwen_image", folder, max_sequence_length=16, dtypes=FLOAT32, embeddings=str(tmp_path))
    conditioning = model.encode(prompts_of(TEXTS))
    embeds, mask = conditioning["prompt_embeds"], conditioning["prompt_embeds_mask"]
    assert embeds.shape == (3, 16, 64) and mask.sum(1).tolist() == lengths and not embeds[~mask].any()
    stored = [load_file(file)["prompt_embeds"].shape for file in tmp_path.glob("*.safetensors")]
    assert sorted(stored) == [(length, 64) for length in sorted(lengths)]
    again = model.encode(prompts_of(TEXTS))  # from the files
    assert all(torch.equal(again[name], value) for name, value in conditioning.items())
    (row,) = model.encode(prompts_of(TEXTS[1:2]))["prompt_embeds_mask"]  # alone it is padded as well
    assert row.tolist() == [True] * 7 + [False] * 9

    pipeline = QwenImagePipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    options = dict(num_inference_steps=STEPS, true_cfg_scale=1.0, height=32, width=32, output_type="latent")
    expected = pipeline(TEXTS, latents=model.noise(SEEDS), **options).images
    # Padded to 16 here and to 12 there.
    torch.testing.assert_close(sample(model, conditioning), expected, rtol=0, atol=1e-5)


def test_qwen_image_guidance_keeps_the_norm_of_each_tokens_conditional_velocity() -> None:
    conditional, unconditional = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    guided = with_conditional_norm(conditional, unconditional, 4.0)
    torch.testing.assert_close(guided.norm(dim=-1), conditional.norm(dim=-1))
    plain = unconditional + 4.0 * (conditional - unconditional)
    torch.testing.assert_close(torch.cosine_similarity(guided, plain, dim=-1), torch.ones(2, 5))


# Z-Image


LONG = "a red circle above a blue square" + " and a green triangle" * 8  # more than 32 tokens with the template


@pytest.mark.parametrize("steps", [4, 10])
def test_z_image_captions_of_different_lengths_paint_as_diffusers(folder_of: FolderOf, steps: int) -> None:
    model = load_nano("z_image", folder_of("z_image"), max_sequence_length=100, dtypes=FLOAT32)
    texts = [TEXTS[0], LONG, TEXTS[1]]
    conditioning = model.encode(prompts_of(texts))
    lengths = conditioning["prompt_embeds_mask"].sum(1)
    assert lengths.tolist() == [len(text.split()) + 8 for text in texts] and lengths[1] > 32
    pipeline = ZImagePipeline.from_pretrained(folder_of("z_image"), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    options = dict(num_inference_steps=steps, guidance_scale=0.0, height=32, width=32, output_type="latent")
    sampled = sample(model, conditioning, steps)
    assert model.transformer.caption_tokens == 128  # to which captions are padded here; to 64 there
    for rows in ([0, 1, 2], [0], [1], [2]):
        x, prompts = model.noise(SEEDS)[rows], [texts[row] for row in rows]
        expected = pipeline(prompts, latents=x, max_sequence_length=100, **options).images
        torch.testing.assert_close(sampled[rows], expected, rtol=0, atol=1e-5)


def test_z_image_compiles_its_blocks_once_for_captions_of_all_lengths(folder_of: FolderOf) -> None:
    model = load_nano("z_image", folder_of("z_image"), max_sequence_length=100, dtypes=FLOAT32)
    batches = [TEXTS, [LONG, TEXTS[1], TEXTS[2]], [LONG] * 3, [TEXTS[2]] * 3]
    conditionings, x, sigma = (
        [model.encode(prompts_of(texts)) for texts in batches],
        model.noise(SEEDS),
        torch.tensor(0.6),
    )
    torch._dynamo.reset()
    counter = CompileCounter()
    with torch.no_grad():
        eager = [model.velocity(model.transformer, x, sigma, conditioning) for conditioning in conditionings]
        compile_blocks(model.transformer, backend=counter)
        for conditioning, expected in zip(conditionings, eager, strict=True):
            velocity = model.velocity(model.transformer, x, sigma, conditioning)
            torch.testing.assert_close(velocity, expected, rtol=0, atol=1e-5)
            assert counter.frame_count == 3  # one of the image, one of the text, one of both
    torch._dynamo.reset()


# Wan


def test_wan_samples_at_the_levels_of_its_unipc_and_a_causal_autoencoder_decodes(folder_of: FolderOf) -> None:
    model = load_nano("wan", folder_of("wan"), dtypes=FLOAT32)
    theirs = model.pipeline.scheduler
    for steps in (1, 10):
        theirs.set_timesteps(steps)
        torch.testing.assert_close(model.sigmas(steps), theirs.sigmas, rtol=0, atol=2e-6)
        assert model.sigmas(steps)[0] == 1  # which a stochastic step needs
    latents = model.noise(SEEDS)
    changed = latents.clone()
    changed[:, :, 1] += 1  # of the later four frames
    frames, others = model.decode(latents), model.decode(changed)
    assert torch.equal(frames[:, 0], others[:, 0]) and (frames[:, 1:] != others[:, 1:]).flatten(2).any(-1).all()


def test_wan_stores_embeddings_without_padding(folder_of: FolderOf, tmp_path: Path) -> None:
    model = load_nano("wan", folder_of("wan"), dtypes=FLOAT32, embeddings=str(tmp_path), max_sequence_length=12)
    embeds = model.encode(prompts_of(TEXTS))["prompt_embeds"]
    stored = [load_file(file)["prompt_embeds"].shape for file in tmp_path.glob("*.safetensors")]
    assert sorted(stored) == [(3, 64), (4, 64), (8, 64)] and embeds.shape == (3, 12, 64)
    assert embeds.any(-1).sum(1).tolist() == [8, 3, 4]
    expected, _ = model.pipeline.encode_prompt(TEXTS, do_classifier_free_guidance=False, max_sequence_length=12)
    assert torch.equal(model.encode(prompts_of(TEXTS))["prompt_embeds"], expected)


def test_wan_names_the_layers_of_its_lora_as_diffusers_and_comfyui_read_them(folder_of: FolderOf) -> None:
    model = load_nano("wan", folder_of("wan"))
    layers = [name for name, part in model.transformer.blocks.named_modules() if isinstance(part, nn.Linear)]
    state = {f"blocks.{name}.lora_A.weight": torch.ones(2, 2) for name in layers}
    parts = [f"{attention}.{part}" for attention in ("self_attn", "cross_attn") for part in "qkvo"] + ["ffn.0", "ffn.2"]
    blocks = range(model.transformer.config.num_layers)
    comfy_ui = {f"diffusion_model.blocks.{number}.{part}.lora_A.weight" for number in blocks for part in parts}
    assert model.named_in_files(state).keys() == comfy_ui
    read = model.pipeline_class.lora_state_dict(model.named_in_files(state))
    assert read.keys() == {f"transformer.{name}" for name in state}
    head = {"proj_out.lora_A.weight": torch.ones(2, 2)}
    assert model.named_in_files(state | head).keys() == {f"transformer.{name}" for name in state | head}


def test_wan_22_and_a_preview_decoder_raise(folder_of: FolderOf, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model.preview_decoder=mine is invalid: .* Set model.preview_decoder=null"):
        load_nano("wan", folder_of("wan"), preview_decoder="mine")
    index = json.loads((Path(folder_of("wan")) / "model_index.json").read_text())
    second = ["diffusers", "WanTransformer3DModel"]
    for key, value in {"transformer_2": second, "boundary_ratio": 0.875, "expand_timesteps": True}.items():
        (tmp_path / "model_index.json").write_text(json.dumps(index | {key: value}))
        for weights in ("pretrained", "random"):
            with pytest.raises(UserError, match=f"model.pretrained={tmp_path} is invalid: it has {key}, of Wan 2.2"):
                load_nano("wan", str(tmp_path), weights=weights)
