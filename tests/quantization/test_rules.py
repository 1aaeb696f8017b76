"""The plan of a quantisation rule, its table, and the conversion."""

import copy

import pytest
import torch
from diffusers import SanaTransformer2DModel
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.quantization import Backend, QuantizationRule, convert, format_table, plan, resolve
from solrl_lightning.quantization.linear import Conv1x1AsLinear
from solrl_lightning.quantization.scaled_linear import NVFP4Linear

CPU = torch.device("cpu")
NVFP4 = resolve("nvfp4", "emulated", CPU)
RULE = QuantizationRule(include=["blocks.*"], exclude={"*.norm": "modulation"})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(32, 96)
        self.to_q = nn.Linear(32, 32)
        self.odd = nn.Linear(24, 32)


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Linear(32, 32), "blocks": nn.ModuleList([Block(), Block()])})


def test_table_of_the_plan_merges_repeated_blocks_and_sums_shares() -> None:
    lines = format_table(plan(transformer(), RULE, NVFP4)).splitlines()
    rows = [" ".join(line.split()) for line in lines]
    # Weights: embed 1024, norm 2 x 3072, to_q 2 x 1024, odd 2 x 768, together 10752.
    assert rows[1:] == [
        "blocks.*.to_q 2 32 -> 32 19.0 % yes",
        "embed 1 32 -> 32 9.5 % no: not included by the rule",
        "blocks.*.norm 2 32 -> 96 57.1 % no: modulation",
        "blocks.*.odd 2 24 -> 32 14.3 % no: in_features 24 is not a multiple of 16",
        "2 of 7 linear layers quantised (19.0 % of their weights), 5 not (81.0 %)",
    ]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (QuantizationRule(["embed"], {"*": "kept"}), r"at least one.*none of 7 \(kept\).*blocks\.\*\.norm, .*embed\."),
        (QuantizationRule(["blok*"]), r"'blok\*' matches none.*Its linear layers are: blocks"),
        (QuantizationRule(["blocks*"], {"*.nrom": "modulation"}), r"'\*\.nrom' matches none"),
    ],
)
def test_rule_that_matches_no_layer_raises(rule: QuantizationRule, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(transformer(), rule, NVFP4)


def test_bf16_plans_and_converts_no_layer() -> None:
    model, backend = transformer(), resolve("bf16", "auto", CPU)
    plans = plan(model, RULE, backend)
    convert(model, plans, backend)
    assert {p.reason for p in plans} == {"precision=bf16"}
    assert not any(isinstance(module, NVFP4Linear) for module in model.modules())


def test_convert_replaces_only_planned_layers() -> None:
    model = transformer()
    expected = NVFP4Linear(model.get_submodule("blocks.1.to_q"))
    convert(model, plan(model, RULE, NVFP4), NVFP4)
    replaced = [name for name, module in model.named_modules() if isinstance(module, NVFP4Linear)]
    assert replaced == ["blocks.0.to_q", "blocks.1.to_q"]
    x = torch.randn(4, 32)
    assert model.get_submodule("blocks.1.to_q")(x).equal(expected(x))


class ExactLinear(nn.Linear):
    """Layer of a backend without rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, linear.bias

    @staticmethod
    def unsupported_reason(linear: nn.Linear) -> str:
        return ""


EXACT = Backend("exact", "exact", ExactLinear, "", 64)
SANA = QuantizationRule(include=["transformer_blocks.*"])


@pytest.fixture(scope="module")
def sana() -> SanaTransformer2DModel:
    torch.manual_seed(0)
    heads = dict(num_attention_heads=4, attention_head_dim=8, num_layers=2)
    heads |= dict(num_cross_attention_heads=4, cross_attention_head_dim=8, cross_attention_dim=32)
    model = SanaTransformer2DModel(in_channels=4, out_channels=4, caption_channels=16, sample_size=4, **heads)
    return model.requires_grad_(False).eval()


def velocity(model: nn.Module, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x, prompt = torch.randn(2, 4, 4, 6, generator=generator), torch.randn(2, 3, 16, generator=generator)
    return model(x.to(dtype), prompt.to(dtype), torch.tensor([200.0, 700.0])).sample


def test_1x1_convolutions_are_planned_as_linear_layers(sana: SanaTransformer2DModel) -> None:
    plans = {p.name.removeprefix("transformer_blocks.1."): p for p in plan(sana, SANA, NVFP4)}
    assert plans["ff.conv_inverted"][1:4] == (32, 160, True)
    assert plans["ff.conv_point"][1:4] == (80, 32, True)
    assert "ff.conv_depth" not in plans  # it mixes pixels
    assert plans["patch_embed.proj"].reason == "not included by the rule"


@pytest.mark.parametrize(
    "different", [{"kernel_size": 3, "padding": 1}, {"stride": 2}, {"groups": 2}, {"padding": 1}], ids=str
)
def test_other_convolutions_are_not_linear(different: dict[str, int]) -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(16, 16, **{"kernel_size": 1} | different), "to_q": nn.Linear(16, 16)})
    assert [p.name for p in plan(model, QuantizationRule(["*"]), NVFP4)] == ["to_q"]


def test_converted_convolution_with_exact_layer_matches_original(sana: SanaTransformer2DModel) -> None:
    original, converted = copy.deepcopy(sana).double(), copy.deepcopy(sana).double()
    plans = plan(converted, SANA, EXACT)
    convert(converted, plans, EXACT)
    replaced = [name for name, module in converted.named_modules() if isinstance(module, Conv1x1AsLinear)]
    assert replaced == [f"transformer_blocks.{i}.ff.conv_{name}" for i in (0, 1) for name in ("inverted", "point")]
    assert sum(isinstance(module, ExactLinear) for module in converted.modules()) == sum(p.quantized for p in plans)
    expected = velocity(original, torch.float64)
    torch.testing.assert_close(velocity(converted, torch.float64), expected, rtol=1e-12, atol=1e-12)


def test_converted_convolution_requantizes_from_conv_weight(sana: SanaTransformer2DModel) -> None:
    convolution = sana.get_submodule("transformer_blocks.0.ff.conv_inverted")
    other = copy.deepcopy(convolution)
    other.weight.mul_(-2)
    layers = nn.ModuleList([copy.deepcopy(convolution), other])
    convert(layers, plan(layers, QuantizationRule(["*"]), NVFP4), NVFP4)
    x = torch.randn(2, 32, 4, 6)
    assert not layers[0](x).equal(layers[1](x))
    layers[0].requantize_(other.weight)
    assert layers[0](x).equal(layers[1](x))
