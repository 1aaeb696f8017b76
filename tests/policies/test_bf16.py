"""``BF16Linear`` is the bfloat16 linear layer: one rounding of an exact sum, forward and backward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nano import load_nano, save_nano
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from solrl_lightning.policies import adapters, bf16
from solrl_lightning.policies.bf16 import BF16Linear, use_fp32_products

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


def test_the_faster_of_two_calls_is_found_by_its_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"first": iter([9.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0]), "second": iter([2.0] * 7)}
    clock = 0.0

    def call(name: str) -> None:
        nonlocal clock
        clock += next(seconds[name])

    monkeypatch.setattr(bf16.time, "perf_counter", lambda: clock)
    assert bf16._is_faster(lambda: call("first"), lambda: call("second"))


def test_attention_in_float32_is_exact_attention_rounded_once_with_its_gradients() -> None:
    torch.manual_seed(0)
    operands = [torch.randn(2, 3, 7, 8).bfloat16().requires_grad_() for _ in range(3)]
    mask = torch.randn(7, 7).bfloat16()
    wide = [value.detach().double().requires_grad_() for value in operands]
    with bf16.FP32Attention():
        found = F.scaled_dot_product_attention(*operands, attn_mask=mask)
        assert F.softmax(operands[0], dim=-1).dtype == torch.bfloat16  # other functions are as they are
    exact = F.scaled_dot_product_attention(*wide, attn_mask=mask.double())
    upstream = torch.randn_like(found)
    found.backward(upstream)
    exact.backward(upstream.double())
    assert found.dtype == torch.bfloat16
    for ours, theirs in [(found, exact), *((a.grad, b.grad) for a, b in zip(operands, wide, strict=True))]:
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=1e-6)
    with bf16.FP32Attention():
        by_name = F.scaled_dot_product_attention(query=operands[0], key=operands[1], value=operands[2], attn_mask=mask)
    assert torch.equal(by_name, found)


@pytest.mark.parametrize("architecture", ["flux1", "sd3", "sana", "flux2", "qwen_image"])
def test_every_attention_of_a_transformer_runs_in_float32(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16, "has_fast_bf16_attention", lambda: False)
    policy = load_nano(architecture, save_nano(tmp_path, architecture))
    seen: set[torch.dtype] = set()
    attention = torch._C._nn.scaled_dot_product_attention

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is attention:
                seen.add((args[0] if args else kwargs["query"]).dtype)
            return func(*args, **(kwargs or {}))

    x = policy.noise(torch.tensor([1, 2]))
    with torch.no_grad(), Watch():
        policy.velocity(policy.transformer, x, torch.tensor(0.5), policy.encode(["a", "b"]))
    assert seen == {torch.float32}
