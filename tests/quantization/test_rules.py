"""Which layers a rule quantises, the table that says so, and the conversion that carries it out."""

import pytest
import torch
from torch import nn

from solrl_lightning.errors import UserError
from solrl_lightning.quantization import QuantizationRule, convert, format_table, plan, resolve
from solrl_lightning.quantization.emulated import NVFP4Linear

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


def test_the_plan_names_every_linear_layer_with_its_fate() -> None:
    plans = {p.name: p for p in plan(transformer(), RULE, NVFP4)}
    assert list(plans) == ["embed", *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("norm", "to_q", "odd"))]
    assert [name for name, p in plans.items() if p.quantized] == ["blocks.0.to_q", "blocks.1.to_q"]
    assert plans["embed"].reason == "not included by the rule"
    assert plans["blocks.0.norm"].reason == "modulation"
    assert plans["blocks.1.odd"].reason == "in_features 24 is not a multiple of 16"


def test_the_table_joins_repeated_blocks_and_adds_up_the_shares() -> None:
    lines = format_table(plan(transformer(), RULE, NVFP4)).splitlines()
    rows = [" ".join(line.split()) for line in lines]
    # Weights: embed 1024, norm 2 x 3072, to_q 2 x 1024, odd 2 x 768, together 10752.
    assert rows[1:] == [
        "blocks.*.to_q 2 32 -> 32 19.0 % yes",
        "embed 1 32 -> 32 9.5 % no: not included by the rule",
        "blocks.*.norm 2 32 -> 96 57.1 % no: modulation",
        "blocks.*.odd 2 24 -> 32 14.3 % no: in_features 24 is not a multiple of 16",
        "2 of 7 linear layers quantised (19.0 % of their weights), 5 kept (81.0 %)",
    ]


def test_a_rule_that_quantises_nothing_is_an_error_that_names_the_layers() -> None:
    everything = QuantizationRule(include=["embed"], exclude={"*": "kept"})
    with pytest.raises(UserError, match=r"at least one.*none of 7 \(kept\).*blocks\.\*\.norm, .*, embed\."):
        plan(transformer(), everything, NVFP4)


@pytest.mark.parametrize("rule", [QuantizationRule(["blok*"]), QuantizationRule(["blocks*"], {"*.nrom": "modulation"})])
def test_a_pattern_that_fits_no_layer_is_an_error_that_names_the_layers(rule: QuantizationRule) -> None:
    with pytest.raises(UserError, match=r"'(blok\*|\*\.nrom)' fits none.*Its linear layers are: blocks"):
        plan(transformer(), rule, NVFP4)


def test_bf16_plans_nothing_and_changes_nothing() -> None:
    model, backend = transformer(), resolve("bf16", "auto", CPU)
    plans = plan(model, RULE, backend)
    convert(model, plans, backend)
    assert {p.reason for p in plans} == {"precision=bf16"}
    assert not any(isinstance(module, NVFP4Linear) for module in model.modules())


def test_convert_replaces_the_planned_layers_only() -> None:
    model = transformer()
    expected = NVFP4Linear.from_linear(model.get_submodule("blocks.1.to_q"))
    convert(model, plan(model, RULE, NVFP4), NVFP4)
    replaced = [name for name, module in model.named_modules() if isinstance(module, NVFP4Linear)]
    assert replaced == ["blocks.0.to_q", "blocks.1.to_q"]
    x = torch.randn(4, 32)
    assert model.get_submodule("blocks.1.to_q")(x).equal(expected(x))
