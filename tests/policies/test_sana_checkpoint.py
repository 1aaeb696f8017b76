"""The LinearFFN checkpoint: its names, what it may hold besides, and what is said of a file that does not fit."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SanaTransformer2DModel
from huggingface_hub import constants
from torch import Tensor

from solrl_lightning.errors import UserError
from solrl_lightning.policies.sana_checkpoint import load_linear_ffn

Save = Callable[[Any], str]


def transformer(seed: int, **changes: Any) -> SanaTransformer2DModel:
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": 12,
        "sample_size": 4,
    }
    model = SanaTransformer2DModel(**config | changes).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_()  # norms and biases begin as ones and zeros, which many a mistake would keep
    return model


def native(model: SanaTransformer2DModel) -> dict[str, Tensor]:
    """The published layout, the other way round: written name by name as the native classes declare their layers."""
    ours = model.state_dict()
    state = {
        "pos_embed": torch.zeros(1, 16, 16),
        "x_embedder.proj.weight": ours["patch_embed.proj.weight"],
        "x_embedder.proj.bias": ours["patch_embed.proj.bias"],
        "y_embedder.y_embedding": torch.zeros(300, 12),
        "attention_y_norm.weight": ours["caption_norm.weight"],
        "final_layer.scale_shift_table": ours["scale_shift_table"],
    }
    for kind in ("weight", "bias"):
        state[f"t_embedder.mlp.0.{kind}"] = ours[f"time_embed.emb.timestep_embedder.linear_1.{kind}"]
        state[f"t_embedder.mlp.2.{kind}"] = ours[f"time_embed.emb.timestep_embedder.linear_2.{kind}"]
        state[f"t_block.1.{kind}"] = ours[f"time_embed.linear.{kind}"]
        state[f"y_embedder.y_proj.fc1.{kind}"] = ours[f"caption_projection.linear_1.{kind}"]
        state[f"y_embedder.y_proj.fc2.{kind}"] = ours[f"caption_projection.linear_2.{kind}"]
        state[f"final_layer.linear.{kind}"] = ours[f"proj_out.{kind}"]
        for i in range(len(model.transformer_blocks)):
            block = {
                name.removeprefix(f"transformer_blocks.{i}."): tensor
                for name, tensor in ours.items()
                if name.startswith(f"transformer_blocks.{i}.")
            }
            to = f"blocks.{i}"
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


def test_every_weight_arrives_to_the_bit_and_the_model_computes_the_same(save: Save) -> None:
    source, target = transformer(seed=1), transformer(seed=2)
    load_linear_ffn(save({"state_dict": native(source), "epoch": 3}), target)
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, source.get_parameter(name)), name
    arguments = (torch.randn(2, 4, 4, 4), torch.randn(2, 3, 12), torch.tensor([100.0, 900.0]))
    with torch.no_grad():
        assert torch.equal(target(*arguments).sample, source(*arguments).sample)


def test_weights_are_rounded_to_the_dtype_of_the_transformer(save: Save) -> None:
    source, target = transformer(seed=1), transformer(seed=2).bfloat16()
    load_linear_ffn(save(native(source)), target)  # without the key state_dict
    assert {parameter.dtype for parameter in target.parameters()} == {torch.bfloat16}
    assert all(torch.equal(p, source.get_parameter(name).bfloat16()) for name, p in target.named_parameters())


def test_weights_of_the_training_loss_are_not_needed(save: Save) -> None:
    extra = {"logvar_linear.weight": torch.zeros(1, 16), "logvar_linear.bias": torch.zeros(1)}
    source, target = transformer(seed=1), transformer(seed=2)
    load_linear_ffn(save(native(source) | extra), target)
    assert torch.equal(target.proj_out.weight, source.proj_out.weight)


def test_unknown_missing_and_misshapen_keys_are_all_listed_and_nothing_is_written(save: Save) -> None:
    state, target = native(transformer(seed=1)), transformer(seed=2)
    before = {name: parameter.clone() for name, parameter in target.named_parameters()}
    state["blocks.0.attn.rope"] = torch.zeros(1)
    del state["blocks.1.mlp.point_conv.linear.weight"]
    state["blocks.0.mlp.inverted_conv.linear.weight"] = state["blocks.0.mlp.inverted_conv.linear.weight"][..., None]
    with pytest.raises(UserError) as error:
        load_linear_ffn(save(state), target)
    assert "1 unknown: blocks.0.attn.rope;" in str(error.value)
    assert "1 missing: blocks.1.mlp.point_conv.linear.weight;" in str(error.value)
    shapes = "blocks.0.mlp.inverted_conv.linear.weight [80, 16, 1] instead of [80, 16]"
    assert f"1 of another shape: {shapes}." in str(error.value)
    assert all(torch.equal(parameter, before[name]) for name, parameter in target.named_parameters())


def test_a_checkpoint_of_more_blocks_is_refused_with_the_first_few_keys(save: Save) -> None:
    with pytest.raises(UserError, match=r"15 unknown: blocks\.1\.attn\.proj\.bias, .*, \.\.\.\. Give SANA_LinearFFN"):
        load_linear_ffn(save(native(transformer(seed=1))), transformer(seed=2, num_layers=1))


def test_a_transformer_with_weights_that_the_file_cannot_have_is_refused(save: Save) -> None:
    with pytest.raises(UserError, match=r"fits SANA 1\.0 only.*transformer_blocks\.0\.attn1\.norm_k\.weight"):
        target = transformer(seed=2, qk_norm="rms_norm_across_heads")
        load_linear_ffn(save(native(transformer(seed=1))), target)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([1], "found: list"),
        ({"ema": 1, "steps": 2}, "found: keys ema, steps"),
        ({"state_dict": {"epoch": 1}}, "found: keys state_dict"),
    ],
)
def test_a_file_without_named_tensors_is_refused_with_what_it_holds(save: Save, content: Any, found: str) -> None:
    with pytest.raises(UserError, match=f"must hold tensors by name.*{found}"):
        load_linear_ffn(save(content), transformer(seed=1))


def test_a_damaged_file_and_one_with_code_in_it_are_refused(save: Save, tmp_path: Path) -> None:
    (tmp_path / "half.pth").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(UserError, match=r"half\.pth .* cannot be read as weights: .*download it again"):
        load_linear_ffn(str(tmp_path / "half.pth"), transformer(seed=1))
    with pytest.raises(UserError, match="cannot be read as weights: Weights only load failed"):
        load_linear_ffn(save({"state_dict": re.compile("x")}), transformer(seed=1))


def test_a_path_without_a_file_and_a_hub_id_out_of_reach_say_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"=./none.pth is invalid: .*yitongl/SANA_LinearFFN"):
        load_linear_ffn("./none.pth", transformer(seed=1))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set.*local SANA_"):
        load_linear_ffn("yitongl/SANA_LinearFFN", transformer(seed=1))
