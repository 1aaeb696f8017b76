"""``BF16Linear`` is the bfloat16 linear layer: one rounding of an exact sum, forward and backward."""

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from solrl_lightning.policies import adapters
from solrl_lightning.policies.bf16 import BF16Linear, has_bf16_units, use_fp32_products

SHAPE = (3, 5, 64)


@pytest.fixture
def layers() -> tuple[nn.Linear, nn.Linear]:
    """A native layer and a ``BF16Linear`` of the same weights."""
    torch.manual_seed(0)
    native = nn.Linear(64, 48).bfloat16()
    ours = nn.Linear(64, 48).bfloat16()
    ours.load_state_dict(native.state_dict())
    use_fp32_products(ours)
    assert type(ours) is BF16Linear and type(native) is nn.Linear
    return native, ours


def spacing(value: Tensor) -> Tensor:
    """The distance between neighbouring bfloat16 numbers (8 significant bits) at ``value``."""
    _, exponent = torch.frexp(value.double())
    return torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent - 8)


def assert_rounded_once(found: Tensor, exact: Tensor, terms: Tensor) -> None:
    """``found`` is the bfloat16 number nearest to ``exact``, up to float32 errors of a sum of total size ``terms``."""
    assert found.dtype == torch.bfloat16
    error = (found.double() - exact).abs()
    assert bool((error <= 0.5 * spacing(exact) + 1e-6 * terms).all())
    assert bool((error > 0).any())


def test_the_result_is_the_exact_one_rounded_once(layers: tuple[nn.Linear, nn.Linear]) -> None:
    _, ours = layers
    x = torch.randn(SHAPE).bfloat16()
    weight, bias = ours.weight.detach().double(), ours.bias.detach().double()
    exact = x.double() @ weight.t() + bias
    terms = x.double().abs() @ weight.abs().t() + bias.abs()
    assert_rounded_once(ours(x).detach(), exact, terms)


def test_it_agrees_with_the_native_layer_within_one_unit_in_the_last_place(
    layers: tuple[nn.Linear, nn.Linear],
) -> None:
    native, ours = layers
    x = torch.randn(SHAPE).bfloat16()
    expected, found = native(x).detach().double(), ours(x).detach().double()
    terms = x.double().abs() @ native.weight.detach().double().abs().t()
    assert bool(((found - expected).abs() <= spacing(expected) + 1e-6 * terms).all())


def test_gradients_are_exact_ones_rounded_once(layers: tuple[nn.Linear, nn.Linear]) -> None:
    _, ours = layers
    x = torch.randn(SHAPE).bfloat16().requires_grad_()
    upstream = torch.randn(3, 5, 48).bfloat16()
    ours(x).backward(upstream)
    g, inputs, weight = (value.detach().double() for value in (upstream, x, ours.weight))
    flat_g, flat_x = g.flatten(0, 1), inputs.flatten(0, 1)
    assert x.grad is not None and ours.weight.grad is not None and ours.bias.grad is not None
    assert_rounded_once(x.grad, g @ weight, g.abs() @ weight.abs())
    assert_rounded_once(ours.weight.grad, flat_g.t() @ flat_x, flat_g.abs().t() @ flat_x.abs())
    assert_rounded_once(ours.bias.grad, flat_g.sum(0), flat_g.abs().sum(0))


def test_a_layer_without_bias_and_a_float32_layer_are_linear_layers_too() -> None:
    torch.manual_seed(0)
    layer = BF16Linear(16, 4, bias=False)
    x = torch.randn(7, 16)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight))


def test_only_plain_linear_layers_are_turned_and_their_parameters_stay() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Special(4, 4), nn.LayerNorm(4))
    before = dict(model.named_parameters())
    use_fp32_products(model)
    assert [type(module) for module in model] == [BF16Linear, Special, nn.LayerNorm]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_peft_wraps_the_layer_and_trains_through_it() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_q = nn.Linear(16, 16)

        def add_adapter(self, config: object, adapter_name: str) -> None:
            from peft import inject_adapter_in_model

            inject_adapter_in_model(config, self, adapter_name)

    model = Attention().bfloat16().requires_grad_(False)
    use_fp32_products(model)
    adapted = adapters.add_adapters(model, LoraConfig(r=4, lora_alpha=8, target_modules=["to_q"]), seed=0)
    assert list(adapted) == ["to_q"] and isinstance(model.to_q, LoraLayer)
    assert type(model.to_q.get_base_layer()) is BF16Linear
    output = model.to_q(torch.randn(2, 16).bfloat16())
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert model.to_q.lora_B["default"].weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "capabilities, expected",
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, True),
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": True, "amx_bf16": True}, True),
        ({"architecture": "aarch64", "neon": True, "bf16": True}, True),
        ({"architecture": "aarch64", "neon": True, "sve": True, "bf16": False}, False),
        ({"architecture": "ppc64le"}, False),
    ],
)
def test_bfloat16_units_are_instructions_and_a_library_that_uses_them(
    capabilities: dict[str, object], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert has_bf16_units() is expected
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert has_bf16_units() is False
