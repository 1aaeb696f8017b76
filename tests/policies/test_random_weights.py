"""Shipped architectures against published sizes, and pipelines with random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from solrl_lightning.errors import UserError
from solrl_lightning.policies.architectures import (
    Architecture,
    Component,
    build_component,
    find_architecture,
    read_architecture,
)
from solrl_lightning.policies.config_files import ARCHITECTURES
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.policies.flux2 import Flux2
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.qwen_image import QwenImage
from solrl_lightning.policies.random_weights import random_component
from solrl_lightning.policies.sana import Sana
from solrl_lightning.policies.sd3 import SD3
from solrl_lightning.sampling import integrate
from tests.nano import PROMPTS, load_policy

FLUX1, SD3_LARGE, SD3_MEDIUM, SANA, FLUX2, QWEN_IMAGE = (
    read_architecture(ARCHITECTURES / name)._replace(name=name)
    for name in (
        "black-forest-labs/FLUX.1-dev",
        "stabilityai/stable-diffusion-3.5-large",
        "stabilityai/stable-diffusion-3.5-medium",
        "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
        "black-forest-labs/FLUX.2-klein-base-4B",
        "Qwen/Qwen-Image",
    )
)
# Parameters as the model cards and the weight files have them, in millions.
PUBLISHED = [
    (FLUX1, "transformer", 11901.4),
    (FLUX1, "vae", 83.8),
    (FLUX1, "text_encoder", 123.1),
    (FLUX1, "text_encoder_2", 4762.3),
    (SD3_LARGE, "transformer", 8056.6),
    (SD3_LARGE, "vae", 83.8),
    (SD3_LARGE, "text_encoder", 123.7),
    (SD3_LARGE, "text_encoder_2", 694.7),
    (SD3_LARGE, "text_encoder_3", 4762.3),
    (SD3_MEDIUM, "transformer", 2243.2),  # and 226.5 of a buffer, the table of positions
    (SANA, "transformer", 1604.5),
    (SANA, "vae", 312.3),
    (SANA, "text_encoder", 2614.3),
    (FLUX2, "transformer", 3875.5),
    (FLUX2, "vae", 84.0),
    (FLUX2, "text_encoder", 4022.5),
    (QWEN_IMAGE, "transformer", 20430.4),
    (QWEN_IMAGE, "vae", 126.9),
    (QWEN_IMAGE, "text_encoder", 8292.2),
]
DTYPES = {"transformer": "bfloat16", "default": "float32"}
KL = dict(down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2) | dict(
    block_out_channels=[8, 8], layers_per_block=1, norm_num_groups=4
)
DC = dict(encoder_block_types=["ResBlock", "EfficientViTBlock"], decoder_block_types=["ResBlock", "EfficientViTBlock"])
DC |= dict(encoder_block_out_channels=[8, 16], decoder_block_out_channels=[8, 16], attention_head_dim=8)
DC |= dict(encoder_layers_per_block=[1, 1], decoder_layers_per_block=[1, 1])
DC |= dict(encoder_qkv_multiscales=[[], [5]], decoder_qkv_multiscales=[[], [5]], latent_channels=8)
HEADS = dict(num_attention_heads=2, attention_head_dim=16)
TEXT = dict(joint_attention_dim=24, pooled_projection_dim=20)
SANA_HEADS = dict(num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32)
SMALL: dict[type[PipelineAdapter], tuple[Architecture, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    Flux1: (
        FLUX1,
        HEADS | TEXT | dict(num_layers=1, num_single_layers=1, axes_dims_rope=[4, 6, 6]),
        KL,
        {"guidance": 1.0},
    ),
    SD3: (SD3_LARGE, HEADS | TEXT | dict(num_layers=2, caption_projection_dim=32, pos_embed_max_size=12), KL, {}),
    Sana: (
        SANA,
        HEADS | SANA_HEADS | dict(num_layers=2, caption_channels=24, in_channels=8, out_channels=8),
        DC,
        {"flow_shift": 1.0},
    ),
    Flux2: (
        FLUX2,
        HEADS | dict(joint_attention_dim=24, num_layers=1, num_single_layers=1, axes_dims_rope=[4, 4, 4, 4]),
        KL,
        {},
    ),
    QwenImage: (
        QWEN_IMAGE,
        HEADS | dict(joint_attention_dim=24, num_layers=1, axes_dims_rope=[4, 6, 6]),
        dict(base_dim=8, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False]),
        {},
    ),
}


def write(architecture: Architecture, folder: Path, **changes: dict[str, Any]) -> str:
    """A pipeline folder of config files alone, with ``changes`` by component; returns it for ``model.pretrained``."""
    index: dict[str, Any] = {"_class_name": architecture.pipeline}
    for name, part in architecture.components.items():
        index[name] = [part.library, part.cls]
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        (folder / name).mkdir()
        (folder / name / file).write_text(json.dumps({**part.config, **changes.get(name, {})}))
    (folder / "model_index.json").write_text(json.dumps(index))
    return str(folder)


@pytest.fixture(scope="module", params=SMALL, ids=lambda policy_class: policy_class.__name__)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PipelineAdapter:
    """A small model of each kind with random weights."""
    policy_class = request.param
    architecture, transformer, vae, own = SMALL[policy_class]
    folder = write(architecture, tmp_path_factory.mktemp("configs"), transformer=transformer, vae=vae)
    return policy_class(
        folder, 16, max_sequence_length=5, decode_batch=2, dtypes=DTYPES, weights="random", embeddings="unused", **own
    )


@pytest.mark.parametrize(
    ("architecture", "name", "millions"), PUBLISHED, ids=[f"{a.name}-{name}" for a, name, _ in PUBLISHED]
)
def test_a_shipped_architecture_has_the_published_number_of_parameters(
    architecture: Architecture, name: str, millions: float
) -> None:
    module = build_component(architecture.components[name], "meta", torch.bfloat16)
    assert sum(p.numel() for p in module.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert all(p.is_meta for p in module.parameters())


def test_the_shipped_schedulers_are_those_of_the_checkpoints() -> None:
    shipped = (FLUX1, SD3_LARGE, SANA, FLUX2, QWEN_IMAGE)
    flux1, sd3, sana, flux2, qwen = (build_component(part.components["scheduler"], "cpu").config for part in shipped)
    assert (flux1.use_dynamic_shifting, flux1.base_shift, flux1.max_shift) == (True, 0.5, 1.15)
    assert (sd3.use_dynamic_shifting, sd3.shift) == (False, 3.0)
    assert (sana.prediction_type, sana.flow_shift) == ("flow_prediction", 3.0)
    assert flux2.use_dynamic_shifting and qwen.use_dynamic_shifting
    assert (qwen.max_image_seq_len, qwen.max_shift, qwen.shift_terminal) == (8192, 0.9, 0.02)


def test_an_architecture_is_that_of_the_hub_id_or_of_the_folder(tmp_path: Path) -> None:
    assert find_architecture("black-forest-labs/FLUX.1-dev", Flux1.pipeline_class) == FLUX1
    medium = find_architecture("stabilityai/stable-diffusion-3.5-medium", SD3.pipeline_class)
    parts = {**SD3_LARGE.components, "transformer": medium.components["transformer"]}
    assert medium.components == parts and medium.components != SD3_LARGE.components
    folder = write(SANA, tmp_path)
    assert find_architecture(folder, Sana.pipeline_class) == SANA._replace(name=folder)


def test_a_hub_id_that_is_not_in_the_package_is_not_taken_for_another() -> None:
    with pytest.raises(UserError, match="somebody/finetune is invalid: .* black-forest-labs/FLUX.1-dev, .*hf download"):
        find_architecture("somebody/finetune", Flux1.pipeline_class)
    with pytest.raises(UserError, match="needs a FluxPipeline; stab.* is a StableDiffusion3Pipeline. Use model=sd3 "):
        find_architecture("stabilityai/stable-diffusion-3.5-medium", Flux1.pipeline_class)


def test_the_embedded_model_is_built_from_its_config_files() -> None:
    trained = load_policy("tiny").transformer
    parts = read_architecture(Path(load_policy("tiny").pretrained)).components
    built = build_component(parts["transformer"], "meta")
    assert {k: v.shape for k, v in built.state_dict().items()} == {k: v.shape for k, v in trained.state_dict().items()}
    assert set(parts) == {"transformer", "vae", "text_encoder", "text_encoder_2", "scheduler"}


def test_activations_stay_of_order_one_through_all_blocks_of_flux1() -> None:
    narrow = HEADS | TEXT | dict(axes_dims_rope=[4, 6, 6])
    deep = Component("diffusers", "FluxTransformer2DModel", {**FLUX1.components["transformer"].config, **narrow})
    transformer = random_component(deep, "cpu", torch.float32)
    assert len(transformer.transformer_blocks) + len(transformer.single_transformer_blocks) == 57
    largest = []
    for block in [*transformer.transformer_blocks, *transformer.single_transformer_blocks]:
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


def test_weights_are_random_biases_zero_and_norms_as_they_were() -> None:
    small = Component("diffusers", "AutoencoderKL", KL | dict(latent_channels=4))
    one, same, other = (random_component(small, "cpu", torch.bfloat16, seed) for seed in (0, 0, 1))
    for name, module in one.named_modules():
        if isinstance(module, nn.GroupNorm):
            assert (module.weight == 1).all() and (module.bias == 0).all(), name
        elif isinstance(module, nn.Conv2d | nn.Linear):
            assert (module.bias == 0).all(), name
            spread = float(module.weight.detach().float().std())
            assert spread == pytest.approx(module.weight[0].numel() ** -0.5, rel=0.4), name
    assert {p.dtype for p in one.parameters()} == {torch.bfloat16}
    weights = [dict(model.named_parameters())["decoder.conv_in.weight"] for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_random_policy_samples_and_decodes(policy: PipelineAdapter) -> None:
    assert policy.transformer.dtype == torch.bfloat16
    conditioning = policy.encode(PROMPTS[:2])
    with torch.no_grad():
        latents = integrate(
            lambda x, sigma: policy.velocity(policy.transformer, x, sigma, conditioning),
            policy.noise(torch.tensor([1, 2])),
            policy.sigmas(2),
        )
    images = policy.decode(latents)
    assert images.shape == (2, 3, 16, 16)
    assert images.isfinite().all()
    assert float(images.std()) > 0.01


def test_the_embedding_of_a_prompt_depends_on_its_text_alone(policy: PipelineAdapter) -> None:
    forwards, backwards = policy.encode(PROMPTS), policy.encode(PROMPTS[::-1])
    tokens = 77 + 5 if isinstance(policy, SD3) else 5
    assert forwards["prompt_embeds"].shape == (3, tokens, 24)
    others = {Sana: {"prompt_mask"}, Flux2: set(), QwenImage: {"prompt_embeds_mask"}}.get(type(policy), {"pooled"})
    assert set(forwards) == {"prompt_embeds"} | others
    for name, value in forwards.items():
        assert torch.equal(value, backwards[name].flip(0)), name
    assert not torch.equal(forwards["prompt_embeds"][0], forwards["prompt_embeds"][1])


def test_on_meta_a_policy_of_real_size_takes_no_memory() -> None:
    sizes: dict[str, Any] = dict(max_sequence_length=300, decode_batch=1, dtypes=DTYPES, flow_shift=1.0)
    policy = Sana(SANA.name, 1024, **sizes, weights="random", device="meta")
    tensors = [*policy.transformer.parameters(), *policy.pipeline.vae.parameters()]
    assert all(tensor.is_meta for tensor in tensors)
    shapes = {name: (value.shape, value.is_meta) for name, value in policy.encode(["a prompt"]).items()}
    assert shapes == {"prompt_embeds": ((1, 300, 2304), True), "prompt_mask": ((1, 300), True)}
