"""``BF16Linear`` is the bfloat16 linear layer: one rounding of an exact sum, forward and backward."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solrl_lightning.policies import bf16
from solrl_lightning.policies.bf16 import BF16Linear, use_fp32_products


def spacing(value: Tensor) -> Tensor:
    """The distance between neighbouring bfloat16 numbers (8 significant bits) at ``value``."""
    _, exponent = torch.frexp(value.double())
    return torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent - 8)


def assert_rounded_once(rounded: Tensor, exact: Tensor, terms: Tensor) -> None:
    """``rounded`` is the bfloat16 number nearest to ``exact``, up to float32 errors of a sum of size ``terms``."""
    assert rounded.dtype == torch.bfloat16
    error = (rounded.double() - exact).abs()
    assert bool((error <= 0.5 * spacing(exact) + 1e-6 * terms).all())
    assert bool((error > 0).any())


def test_result_and_gradients_are_exact_ones_rounded_once() -> None:
    torch.manual_seed(0)
    native, layer = (nn.Linear(64, 48).bfloat16() for _ in range(2))
    layer.load_state_dict(native.state_dict())
    use_fp32_products(layer)
    x = torch.randn(3, 5, 64).bfloat16().requires_grad_()
    upstream = torch.randn(3, 5, 48).bfloat16()
    y = layer(x)
    y.backward(upstream)
    g, inputs, weight, bias = (value.detach().double() for value in (upstream, x, layer.weight, layer.bias))
    exact, terms = inputs @ weight.t() + bias, inputs.abs() @ weight.abs().t() + bias.abs()
    assert_rounded_once(y.detach(), exact, terms)
    by_torch = native(x).detach().double()
    assert bool(((y.double() - by_torch).abs() <= spacing(by_torch) + 1e-6 * terms).all())
    flat_g, flat_x = g.flatten(0, 1), inputs.flatten(0, 1)
    assert_rounded_once(x.grad, g @ weight, g.abs() @ weight.abs())
    assert_rounded_once(layer.weight.grad, flat_g.t() @ flat_x, flat_g.abs().t() @ flat_x.abs())
    assert_rounded_once(layer.bias.grad, flat_g.sum(0), flat_g.abs().sum(0))
    without_bias, x = BF16Linear(16, 4, bias=False), torch.randn(7, 16)
    assert torch.equal(without_bias(x), F.linear(x, without_bias.weight))  # as in float32


def test_only_plain_linear_layers_are_converted_in_place() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Special(4, 4), nn.LayerNorm(4))
    before = dict(model.named_parameters())
    use_fp32_products(model)
    assert [type(module) for module in model] == [BF16Linear, Special, nn.LayerNorm]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("units", "name", "fast"),
    [
        ({"avx512_bf16": True}, "CPU AMD EPYC 9B14", True),
        ({"avx512_bf16": False}, "CPU AMD EPYC 7B13", False),
        ({"avx512_bf16": True, "amx_bf16": False}, "CPU Intel(R) Xeon(R) Processor", False),
        ({"avx512_bf16": True, "amx_bf16": True}, "CPU Intel(R) Xeon(R) Processor", True),
        ({}, "CPU aarch64", False),
    ],
)
def test_the_model_of_the_cpu_decides_in_which_products_run(
    monkeypatch: pytest.MonkeyPatch, units: dict[str, bool], name: str, fast: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    monkeypatch.setattr(bf16, "cpu_name", lambda: name)
    assert bf16.has_fast_bf16_products.__wrapped__() == fast
