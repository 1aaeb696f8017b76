"""Shipped architectures against published sizes, and pipelines with random weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from nano import PROMPTS, load_model, load_nano, prompts_of
from torch import nn

from solrl_lightning.errors import UserError
from solrl_lightning.policies.architectures import (
    Component,
    build_component,
    find_architecture,
    random_component,
    read_architecture,
)
from solrl_lightning.policies.config_files import ARCHITECTURES
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.sana import Sana
from solrl_lightning.policies.sd3 import SD3
from solrl_lightning.sampling import integrate

FLUX1, SD3_LARGE = "black-forest-labs/FLUX.1-dev", "stabilityai/stable-diffusion-3.5-large"
SD3_MEDIUM = "stabilityai/stable-diffusion-3.5-medium"
SANA = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
FLUX2, QWEN_IMAGE = "black-forest-labs/FLUX.2-klein-base-4B", "Qwen/Qwen-Image"
Z_IMAGE = "Tongyi-MAI/Z-Image"
WAN, WAN_14B = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.1-T2V-14B-Diffusers"
# Parameters as the model cards and the weight files have them, in millions.
PUBLISHED: dict[str, dict[str, float]] = {
    FLUX1: dict(transformer=11901.4, vae=83.8, text_encoder=123.1, text_encoder_2=4762.3),
    SD3_LARGE: dict(transformer=8056.6, vae=83.8, text_encoder=123.7, text_encoder_2=694.7, text_encoder_3=4762.3),
    SD3_MEDIUM: dict(transformer=2243.2),  # and 226.5 of a buffer, the table of positions
    SANA: dict(transformer=1604.5, vae=312.3, text_encoder=2614.3),
    FLUX2: dict(transformer=3875.5, vae=84.0, text_encoder=4022.5),
    QWEN_IMAGE: dict(transformer=20430.4, vae=126.9, text_encoder=8292.2),
    Z_IMAGE: dict(transformer=6154.9, vae=83.8, text_encoder=4022.5),
    WAN: dict(transformer=1419.0, vae=126.9, text_encoder=5680.9),
    WAN_14B: dict(transformer=14288.5),
}
EMBEDDINGS = {  # of random weights: tokens and width
    "flux1": {"prompt_embeds": (10, 64), "pooled": (64,)},
    "sd3": {"prompt_embeds": (77 + 10, 64), "pooled": (64,)},
    "sana": {"prompt_embeds": (10, 64), "prompt_mask": (10,)},
    "flux2": {"prompt_embeds": (10, 96)},
    "qwen_image": {"prompt_embeds": (10, 64), "prompt_embeds_mask": (10,)},
    "z_image": {"prompt_embeds": (10, 64)},
    "wan": {"prompt_embeds": (10, 64)},
}


def shipped(name: str) -> dict[str, Component]:
    return dict(read_architecture(ARCHITECTURES / name).components)


@pytest.fixture(scope="module")
def model(architecture: str, folder: str) -> PipelineAdapter:
    return load_nano(architecture, folder, weights="random", embeddings="unused")


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_architecture_has_the_published_number_of_parameters(name: str) -> None:
    for component, millions in PUBLISHED[name].items():
        parameters = list(build_component(shipped(name)[component], "meta", torch.bfloat16).parameters())
        assert sum(p.numel() for p in parameters) / 1e6 == pytest.approx(millions, abs=0.05), component
        assert {(p.dtype, p.is_meta) for p in parameters} == {(torch.bfloat16, True)}


def test_shipped_schedulers_are_those_of_the_checkpoints() -> None:
    names = (FLUX1, SD3_LARGE, SANA, FLUX2, QWEN_IMAGE, Z_IMAGE, WAN)
    flux1, sd3, sana, flux2, qwen, z_image, wan = (
        build_component(shipped(name)["scheduler"], "cpu").config for name in names
    )
    assert (flux1.use_dynamic_shifting, flux1.base_shift, flux1.max_shift) == (True, 0.5, 1.15)
    assert (sd3.use_dynamic_shifting, sd3.shift) == (False, 3.0)
    assert (sana.prediction_type, sana.flow_shift) == ("flow_prediction", 3.0)
    assert (z_image.use_dynamic_shifting, z_image.shift) == (False, 6.0)
    assert (wan.prediction_type, wan.use_flow_sigmas, wan.flow_shift) == ("flow_prediction", True, 3.0)
    assert flux2.use_dynamic_shifting and qwen.use_dynamic_shifting
    assert (qwen.max_image_seq_len, qwen.max_shift, qwen.shift_terminal) == (8192, 0.9, 0.02)


def test_architecture_is_that_of_the_hub_id_or_of_the_folder(nano_folder: str) -> None:
    medium = find_architecture(SD3_MEDIUM, SD3.pipeline_class)
    transformer = {"transformer": shipped(SD3_MEDIUM)["transformer"]}
    assert medium.name == SD3_MEDIUM
    assert medium.components == shipped(SD3_LARGE) | transformer != shipped(SD3_LARGE)
    nano = find_architecture(nano_folder, Flux1.pipeline_class)
    assert nano.name == nano_folder and nano.components["transformer"].config["in_channels"] == 32


@pytest.mark.parametrize("part", ["transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json"])
def test_incomplete_folder_raises(nano_folder: str, tmp_path: Path, part: str) -> None:
    folder = Path(shutil.copytree(nano_folder, tmp_path / "copy"))
    for text in ("", "[]", None):
        (folder / part).write_text(text) if text is not None else (folder / part).unlink()
        damaged = "must be a JSON object" if text is not None else f"has none of {part.partition('/')[0]}"
        with pytest.raises(UserError, match=f"{damaged}.* again, whole"):
            find_architecture(str(folder), Flux1.pipeline_class)


def test_unknown_hub_id_raises() -> None:
    with pytest.raises(UserError, match="somebody/finetune is invalid: .* black-forest-labs/FLUX.1-dev, .*hf download"):
        find_architecture("somebody/finetune", Flux1.pipeline_class)
    with pytest.raises(UserError, match="hf download <its hub id> --include"):
        find_architecture("./flux1-dev.safetensors", Flux1.pipeline_class)


def test_embedded_model_is_built_from_its_config_files() -> None:
    trained = load_model("tiny")
    parts = read_architecture(Path(trained.pretrained)).components
    built, weights = build_component(parts["transformer"], "meta").state_dict(), trained.transformer.state_dict()
    assert {name: value.shape for name, value in built.items()} == {name: w.shape for name, w in weights.items()}
    assert set(parts) == {"transformer", "vae", "text_encoder", "text_encoder_2", "scheduler"}


def test_activations_stay_of_order_one_through_all_blocks_of_flux1() -> None:
    narrow: dict[str, Any] = dict(num_attention_heads=2, attention_head_dim=16, axes_dims_rope=[4, 6, 6])
    narrow |= dict(joint_attention_dim=24, pooled_projection_dim=20)
    deep = Component("diffusers", "FluxTransformer2DModel", {**shipped(FLUX1)["transformer"].config, **narrow})
    transformer = random_component(deep, "cpu", torch.float32)
    blocks, largest = [*transformer.transformer_blocks, *transformer.single_transformer_blocks], []
    assert len(blocks) == 57
    for block in blocks:
        block.register_forward_hook(lambda _, __, output: largest.append(max(float(t.abs().max()) for t in output)))
    with torch.no_grad():
        velocity = transformer(
            hidden_states=torch.randn(1, 16, 64),
            encoder_hidden_states=torch.randn(1, 4, 24),
            pooled_projections=torch.randn(1, 20),
            timestep=torch.ones(1),
            guidance=torch.ones(1),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(4, 3),
        ).sample
    assert max(largest) < 1000
    assert 0.1 < float(velocity.std()) < 10


def test_weights_are_random_biases_zero_and_norms_one() -> None:
    config = dict(down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
    config |= dict(block_out_channels=[8, 8], layers_per_block=1, norm_num_groups=4, latent_channels=4)
    small = Component("diffusers", "AutoencoderKL", config)
    one, same, other = (random_component(small, "cpu", torch.bfloat16, seed) for seed in (0, 0, 1))
    for name, module in one.named_modules():
        if isinstance(module, nn.GroupNorm):
            assert (module.weight == 1).all() and (module.bias == 0).all(), name
        elif isinstance(module, nn.Conv2d | nn.Linear):
            assert (module.bias == 0).all(), name
            spread = float(module.weight.detach().float().std())
            assert spread == pytest.approx(module.weight[0].numel() ** -0.5, rel=0.4), name
    assert {p.dtype for p in one.parameters()} == {torch.bfloat16}
    weights = [model.decoder.conv_in.weight for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_random_policy_samples_and_decodes(model: PipelineAdapter) -> None:
    assert model.transformer.dtype == torch.bfloat16
    conditioning = model.encode(prompts_of(PROMPTS[:2]))
    with torch.no_grad():
        latents = integrate(
            lambda x, sigma: model.velocity(model.transformer, x, sigma, conditioning),
            model.noise(torch.tensor([1, 2])),
            model.sigmas(2),
        )
    images = model.decode(latents)
    assert (len(images), *images.shape[-3:]) == (2, 3, 32, 32)
    assert images.isfinite().all() and float(images.std()) > 0.01


def test_random_embedding_depends_on_its_prompt_alone(model: PipelineAdapter, architecture: str) -> None:
    forwards, backwards = model.encode(prompts_of(PROMPTS)), model.encode(prompts_of(PROMPTS[::-1]))
    assert {name: tuple(value.shape[1:]) for name, value in forwards.items()} == EMBEDDINGS[architecture]
    for name, value in forwards.items():
        assert torch.equal(value, backwards[name].flip(0)), name
    assert not torch.equal(forwards["prompt_embeds"][0], forwards["prompt_embeds"][1])


def test_policy_of_real_size_on_meta_takes_no_memory() -> None:
    options: dict[str, Any] = dict(max_sequence_length=300, decode_batch=1, flow_shift=1.0, weights="random")
    options |= dict(dtypes={"transformer": "bfloat16", "default": "float32"}, device="meta")
    model = Sana(SANA, 1024, **options)
    assert all(p.is_meta for p in [*model.transformer.parameters(), *model.pipeline.vae.parameters()])
    shapes = {name: (value.shape, value.is_meta) for name, value in model.encode(prompts_of(["a prompt"])).items()}
    assert shapes == {"prompt_embeds": ((1, 300, 2304), True), "prompt_mask": ((1, 300), True)}
