"""``BF16Linear`` is the bfloat16 linear layer: one rounding of an exact sum, forward and backward."""

from typing import Any

import pytest
import torch
from nano import load_nano
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

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


def test_faster_of_two_calls_has_the_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"first": iter([9.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0]), "second": iter([2.0] * 7)}
    clock = 0.0

    def call(name: str) -> None:
        nonlocal clock
        clock += next(seconds[name])

    monkeypatch.setattr(bf16.time, "perf_counter", lambda: clock)
    assert bf16._is_faster(lambda: call("first"), lambda: call("second"))


def test_fp32_attention_and_its_gradients_are_rounded_once() -> None:
    torch.manual_seed(0)
    operands = [torch.randn(2, 3, 7, 8).bfloat16().requires_grad_() for _ in range(3)]
    query, key, value = operands
    mask = torch.randn(7, 7).bfloat16()
    wide = [value.detach().double().requires_grad_() for value in operands]
    with bf16.FP32Attention():
        y = F.scaled_dot_product_attention(*operands, attn_mask=mask)
        by_name = F.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=mask)
        assert F.softmax(query, dim=-1).dtype == torch.bfloat16  # other functions are as they are
    assert y.dtype == torch.bfloat16 and torch.equal(by_name, y)
    exact = F.scaled_dot_product_attention(*wide, attn_mask=mask.double())
    upstream = torch.randn_like(y)
    y.backward(upstream)
    exact.backward(upstream.double())
    for ours, theirs in [(y, exact), *((a.grad, b.grad) for a, b in zip(operands, wide, strict=True))]:
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=1e-6)


def test_every_attention_of_a_transformer_runs_in_float32(
    architecture: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16, "has_fast_bf16_attention", lambda: False)
    policy = load_nano(architecture, folder)
    dtypes: set[torch.dtype] = set()
    attention = torch._C._nn.scaled_dot_product_attention

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is attention:
                dtypes.add((args[0] if args else kwargs["query"]).dtype)
            return func(*args, **(kwargs or {}))

    x, conditioning = policy.noise(torch.tensor([1, 2])), policy.encode(["a", "b"])
    with torch.no_grad(), Watch():
        policy.velocity(policy.transformer, x, torch.tensor(0.5), conditioning)
    assert dtypes == {torch.float32}
