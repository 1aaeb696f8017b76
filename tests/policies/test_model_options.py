"""conf/model: the published hyper-parameters, and rules and targets that fit the models at their real size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from nano import PROMPTS, model_class, model_options, prompts_of
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from solrl_lightning.options.run import Run
from solrl_lightning.policies.architectures import build_component, find_architecture
from solrl_lightning.quantization import QuantizationRule, plan, resolve

Compose = Callable[..., Run]

PUBLISHED: dict[str, dict[str, Any]] = {
    "flux1": dict(resolution=512, max_sequence_length=128, guidance=1.0, eval_steps=28, micro_batch=12),
    "sd3": dict(
        resolution=1024, max_sequence_length=128, eval_steps=40, train_timestep_fraction=0.6, micro_batch=4,
        max_grad_norm=0.002,
    ),
    "sana": dict(
        resolution=1024, max_sequence_length=300, flow_shift=1.0, solver="euler", eval_steps=40,
        train_timestep_fraction=0.6, micro_batch=16,
    ),
    "flux2": dict(resolution=512, max_sequence_length=512, eval_steps=28, micro_batch=12),  # as FLUX.1: unpublished
    "qwen_image": dict(resolution=512, max_sequence_length=128, eval_steps=28, micro_batch=4),  # likewise
    "z_image": dict(
        resolution=512, max_sequence_length=128, eval_steps=28, micro_batch=12, kl_weight=0.05,  # and with an anchor
    ),
    "wan": dict(
        resolution=320, num_frames=33, frames=4, max_sequence_length=512, eval_steps=28, micro_batch=4, rollout_batch=8,
    ),
}  # fmt: skip
COMMON = dict(learning_rate=3e-4, kl_weight=1e-4, rollout_batch=24, prompts_per_iteration=48, evaluation_every="auto")
COMMON |= dict(solver="dpm2", preview_steps=6, full_steps=10, train_timestep_fraction=0.4, max_grad_norm=1.0)
LORA_LAYERS = {"flux1": 19 * 4 + 38 * 3, "sd3": 38 * 8 - 1, "sana": 20 * 8, "flux2": 5 * 4 + 20, "qwen_image": 60 * 4}
LORA_LAYERS |= {"z_image": (30 + 2 + 2) * 4, "wan": 30 * 8}
QUANTISED = {
    "flux1": 0.72,
    "sd3": 0.66,
    "sana": 0.97,
    "flux2": 0.95,
    "qwen_image": 0.67,
    "z_image": 0.98,
    "wan": 0.98,
}  # of the linear weights
KEPT = {  # what the rule must not touch
    "flux1": {"x_embedder", "context_embedder", "norm_out.linear", "proj_out", "transformer_blocks.0.norm1.linear"},
    "sd3": {"context_embedder", "norm_out.linear", "proj_out", "transformer_blocks.0.norm1_context.linear"},
    "flux2": {"x_embedder", "context_embedder", "norm_out.linear", "proj_out", "single_stream_modulation.linear"},
    "qwen_image": {"img_in", "txt_in", "norm_out.linear", "proj_out", "transformer_blocks.0.img_mod.1"},
    "z_image": {
        "all_x_embedder.2-1",
        "cap_embedder.1",
        "t_embedder.mlp.0",
        "all_final_layer.2-1.linear",
        "layers.0.adaLN_modulation.0",
    },
    "wan": {"condition_embedder.time_proj", "condition_embedder.text_embedder.linear_1", "proj_out"},
    "sana": {"proj_out", "time_embed.linear", "caption_projection.linear_1", "patch_embed.proj"},
}


@pytest.fixture(scope="module")
def real(architecture: str) -> nn.Module:
    """The transformer at its real size, without memory."""
    shipped = find_architecture(model_options(architecture)["pretrained"], model_class(architecture).pipeline_class)
    return build_component(shipped.components["transformer"], "meta", torch.bfloat16)


def test_hyper_parameters_are_the_published_ones(architecture: str, compose: Compose) -> None:
    model = compose(f"model={architecture}").model
    expected = COMMON | PUBLISHED[architecture]
    assert {key: getattr(model, key) for key in expected} == expected
    assert (model.lora.rank, model.lora.alpha) == (32, 64)


def test_lora_adapts_the_attention_of_every_block_and_nothing_else(
    architecture: str, real: nn.Module, compose: Compose
) -> None:
    config = LoraConfig(target_modules=list(compose(f"model={architecture}").model.lora.target_modules))
    adapted = {name for name, _ in real.named_modules() if check_target_module_exists(config, name)}
    assert len(adapted) == LORA_LAYERS[architecture]
    assert all(".att" in name and isinstance(real.get_submodule(name), nn.Linear) for name in adapted)


def test_shadow_covers_attention_and_mlp_of_every_block(architecture: str, real: nn.Module, compose: Compose) -> None:
    model = compose(f"model={architecture}").model
    rule = QuantizationRule(list(model.quantization.include), dict(model.quantization.exclude))
    plans = plan(real, rule, resolve("nvfp4", "auto", torch.device("cpu")))
    weights = {p.name: p.in_features * p.out_features for p in plans}
    quantized = {p.name for p in plans if p.quantized}
    share = sum(weights[name] for name in quantized) / sum(weights.values())
    assert share == pytest.approx(QUANTISED[architecture], abs=0.01)
    modulations = (".norm", "_mod.", "_modulation.")
    lists = tuple(name for name, part in real.named_children() if isinstance(part, nn.ModuleList))
    in_blocks = {name for name in weights if name.startswith(lists) and not any(part in name for part in modulations)}
    assert quantized == in_blocks  # and so no embedder, no modulation, no output projection
    assert KEPT[architecture] <= weights.keys() - quantized
    assert all(p.reason != "not included by the rule" for p in plans)


def test_options_reach_the_policy(architecture: str, folder: str, compose: Compose, tmp_path: Path) -> None:
    options = (f"pretrained={folder}", "resolution=32", "max_sequence_length=10", f"embeddings={tmp_path}")
    cfg = compose(f"model={architecture}", *(f"model.{option}" for option in options))
    model, options = instantiate(cfg.model.policy, device="cpu"), cfg.model.policy
    assert type(model) is model_class(architecture)
    assert all(getattr(model, key) == options[key] for key in ("resolution", "decode_batch", "variant"))
    assert (
        model.pipeline.text_encoder is None
        and model.encode(prompts_of(PROMPTS))["prompt_embeds"].dtype == torch.bfloat16
    )
    vae = torch.bfloat16 if architecture == "sana" else torch.float32
    assert model.pipeline.vae.dtype == vae and model.pipeline.text_encoder.dtype == torch.bfloat16
    assert model.transformer.is_gradient_checkpointing


def test_sd3_medium_is_large_with_another_transformer(compose: Compose) -> None:
    large, medium = (compose(f"model={name}").model.model_dump() for name in ("sd3", "sd3_medium"))
    assert {key for key in large if large[key] != medium[key]} == {"pretrained", "needs", "policy"}
    assert medium["policy"] == large["policy"] | {"pretrained": "stabilityai/stable-diffusion-3.5-medium"}
    small = compose("model=sd3_medium_512").model.model_dump()
    differs = {key for key in medium if medium[key] != small[key]}
    assert differs == {"resolution", "train_timestep_fraction", "micro_batch", "max_grad_norm", "policy"}
    shipped = find_architecture(medium["pretrained"], model_class("sd3").pipeline_class)
    transformer = build_component(shipped.components["transformer"], "meta", torch.bfloat16)
    lora = LoraConfig(target_modules=medium["lora"]["target_modules"])
    adapted = {name for name, _ in transformer.named_modules() if check_target_module_exists(lora, name)}
    assert len(adapted) == 24 * 8 - 1 + 13 * 4  # attention of both streams, and the image stream's second one
