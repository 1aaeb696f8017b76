"""The LinearFFN checkpoint: its names, its optional keys, and the errors of a file that does not fit."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SanaPipeline, SanaTransformer2DModel
from nano import build_nano_sana, load_nano, lora_config, random_state
from torch import Tensor

from solrl_lightning.errors import UserError
from solrl_lightning.names import TRAINED
from solrl_lightning.policies.base_weights import dense
from solrl_lightning.policies.sana_checkpoint import load_linear_ffn
from solrl_lightning.training.transformers import AdaptedTransformer

Save = Callable[[Any], str]


CONFIG = dict(num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=4, in_channels=4, out_channels=4)
CONFIG |= dict(num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=12)
LAYERS = {  # outside of the blocks
    "x_embedder.proj": "patch_embed.proj",
    "t_embedder.mlp.0": "time_embed.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_embed.emb.timestep_embedder.linear_2",
    "t_block.1": "time_embed.linear",
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "final_layer.linear": "proj_out",
}


def transformer(seed: int, **changes: Any) -> SanaTransformer2DModel:
    torch.manual_seed(seed)
    model = SanaTransformer2DModel(**CONFIG | changes).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_()  # norms and biases begin as ones and zeros, which many a mistake would keep
    return model


def native(model: SanaTransformer2DModel) -> dict[str, Tensor]:
    """The published layout, the other way round: written name by name as the native classes declare their layers."""
    ours = model.state_dict()
    state = {
        "pos_embed": torch.zeros(1, 16, 16),
        "y_embedder.y_embedding": torch.zeros(300, 12),
        "attention_y_norm.weight": ours["caption_norm.weight"],
        "final_layer.scale_shift_table": ours["scale_shift_table"],
    }
    for kind in ("weight", "bias"):
        state |= {f"{layer}.{kind}": ours[f"{name}.{kind}"] for layer, name in LAYERS.items()}
        for i in range(len(model.transformer_blocks)):
            start, to = f"transformer_blocks.{i}.", f"blocks.{i}"
            block = {name.removeprefix(start): tensor for name, tensor in ours.items() if name.startswith(start)}
            state[f"{to}.scale_shift_table"] = block["scale_shift_table"]
            state[f"{to}.attn.qkv.weight"] = torch.cat([block[f"attn1.to_{x}.weight"] for x in "qkv"])
            state[f"{to}.attn.proj.{kind}"] = block[f"attn1.to_out.0.{kind}"]
            state[f"{to}.cross_attn.q_linear.{kind}"] = block[f"attn2.to_q.{kind}"]
            state[f"{to}.cross_attn.kv_linear.{kind}"] = torch.cat([block[f"attn2.to_{x}.{kind}"] for x in "kv"])
            state[f"{to}.cross_attn.proj.{kind}"] = block[f"attn2.to_out.0.{kind}"]
            state[f"{to}.mlp.inverted_conv.linear.weight"] = block["ff.conv_inverted.weight"][:, :, 0, 0]
            state[f"{to}.mlp.inverted_conv.linear.bias"] = block["ff.conv_inverted.bias"]
            state[f"{to}.mlp.depth_conv.conv.{kind}"] = block[f"ff.conv_depth.{kind}"]
            state[f"{to}.mlp.point_conv.linear.weight"] = block["ff.conv_point.weight"][:, :, 0, 0]
    return state


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def saved(content: Any) -> str:
        torch.save(content, tmp_path / "weights.pth")
        return str(tmp_path / "weights.pth")

    return saved


def test_every_weight_is_loaded_to_the_bit(save: Save) -> None:
    source, target = transformer(seed=1), transformer(seed=2)
    load_linear_ffn(save({"state_dict": native(source), "epoch": 3}), target)
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, source.get_parameter(name)), name
    arguments = (torch.randn(2, 4, 4, 4), torch.randn(2, 3, 12), torch.tensor([100.0, 900.0]))
    with torch.no_grad():
        assert torch.equal(target(*arguments).sample, source(*arguments).sample)


def test_weights_are_rounded_and_those_of_the_training_loss_ignored(save: Save) -> None:
    source, target = transformer(seed=1), transformer(seed=2).bfloat16()
    extra = {"logvar_linear.weight": torch.zeros(1, 16), "logvar_linear.bias": torch.zeros(1)}
    load_linear_ffn(save(native(source) | extra), target)  # without the key state_dict
    assert {parameter.dtype for parameter in target.parameters()} == {torch.bfloat16}
    assert all(torch.equal(p, source.get_parameter(name).bfloat16()) for name, p in target.named_parameters())


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_weights_are_the_base_into_which_a_lora_is_fused_and_which_is_stored(
    save: Save, folder_of: Callable[[str], str], tmp_path: Path, fuses: bool, storage: str
) -> None:
    pipeline, other = build_nano_sana(), build_nano_sana(seed=1).transformer
    pipeline.register_modules(transformer=other)
    pipeline.save_pretrained(tmp_path / "whole")
    options: dict[str, Any] = dict(base_weights=storage, device="cpu")
    if fuses:
        adapted = AdaptedTransformer(build_nano_sana().transformer, lora_config(), seed=0)
        state = random_state(adapted.state(TRAINED), seed=0)
        SanaPipeline.save_lora_weights(tmp_path / "lora", state)
        options |= dict(fused_lora=str(tmp_path / "lora" / "pytorch_lora_weights.safetensors"))
    path = save(native(other))
    model = load_nano("sana", folder_of("sana"), transformer_weights=path, **options)
    expected = load_nano("sana", str(tmp_path / "whole"), **options).transformer.state_dict()
    for name, value in model.transformer.state_dict().items():
        assert torch.equal(dense(value), dense(expected[name])), name


INVERTED, POINT = "blocks.0.mlp.inverted_conv.linear.weight", "blocks.1.mlp.point_conv.linear.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update({"blocks.0.attn.rope": torch.zeros(1)}), "unexpectedly 1 .* blocks.0.attn.rope"),
        (lambda state: state.pop(POINT), f"lacks 1 tensors, such as {POINT}"),
        (lambda state: state.update({INVERTED: state[INVERTED][..., None]}), r"\[80, 16, 1\] for \[80, 16\]"),
        (lambda state: state[POINT].flatten()[:1].fill_(math.nan), f"found: {POINT} of values that are not finite"),
        (lambda state: state.update({POINT: state[POINT].to(torch.int8)}), f"found: {POINT} of torch.int8"),
    ],
)
def test_other_weights_raise_and_nothing_is_written(save: Save, change: Any, message: str) -> None:
    state, target = native(transformer(seed=1)), transformer(seed=2)
    before = {name: parameter.clone() for name, parameter in target.named_parameters()}
    change(state)
    with pytest.raises(UserError, match=message):
        load_linear_ffn(save(state), target)
    assert all(torch.equal(parameter, before[name]) for name, parameter in target.named_parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 1}, "has unexpectedly 15 tensors, such as blocks.1.attn.proj.bias"),
        ({"qk_norm": "rms_norm_across_heads"}, "SANA 1.0 lacks transformer_blocks.0.attn1.norm_k.weight"),
    ],
)
def test_transformer_of_another_kind_raises(save: Save, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_linear_ffn(save(native(transformer(seed=1))), transformer(seed=2, **changes))
