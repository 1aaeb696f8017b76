"""Attention with products in bfloat16 and in float32 against PyTorch's in float64, and which transformers have it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nano import load_nano, prompts_of, relative_error
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from solrl_lightning.policies import bf16_attention
from solrl_lightning.policies.bf16_attention import BF16Attention, FP32Attention


def attention_and_gradients(attend: Callable[..., Tensor], *operands: Tensor) -> list[Tensor]:
    leaves = [value.detach().clone().requires_grad_() for value in operands]
    y = attend(*leaves)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_bf16_attention_and_its_gradients_are_near_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of size 4 are rounded to multiples of 2^-6, which leaves errors of at most 2^-7 in the probabilities."""

    def attend(*operands: Tensor) -> Tensor:
        with BF16Attention():
            return F.scaled_dot_product_attention(*operands, attn_mask=None, dropout_p=0.0, is_causal=False)

    torch.manual_seed(0)
    shapes = (2, 3, 70, 16), (2, 3, 81, 16), (2, 3, 81, 24)
    operands = [(1.5 * torch.randn(shape)).bfloat16() for shape in shapes]
    exact = attention_and_gradients(F.scaled_dot_product_attention, *(value.double() for value in operands))
    whole = attention_and_gradients(attend, *operands)
    monkeypatch.setattr(bf16_attention, "_SCORES", 4 * 70 * 81)  # two parts, of four and of two rows
    for how in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        for ours, others, theirs in zip(attention_and_gradients(how, *operands), whole, exact, strict=True):
            assert ours.dtype == torch.bfloat16 and torch.equal(ours, others)
            assert 2**-10 < relative_error(ours, theirs) < 2**-6


@pytest.mark.parametrize(
    ("offset", "size"), [(-300, 1), (-60, 1), (-8, 1), (8, 1), (20, 1), (60, 1), (300, 1), (0, 6), (0, 80)]
)
def test_bf16_attention_of_large_scores_or_with_a_common_offset_is_as_near(offset: float, size: float) -> None:
    """Without rounded scores: bfloat16 has steps of 1/4 at 60. The offset, which softmax does not see, is bfloat16."""
    torch.manual_seed(0)
    query, key = size * torch.randn(2, 70, 16).bfloat16(), torch.randn(2, 81, 16).bfloat16()
    query[..., 0], key[..., 0] = 16.0, offset / 4
    operands = query, key, torch.randn(2, 81, 24).bfloat16()
    ours = attention_and_gradients(lambda *operands: bf16_attention.attention_in_bf16(*operands, 0.25), *operands)
    theirs = attention_and_gradients(F.scaled_dot_product_attention, *(value.double() for value in operands))
    for index, limit in ((0, 1e-2), (3, 1.5e-2)):  # the result, and the gradient of the value
        assert ours[index].dtype == torch.bfloat16 and relative_error(ours[index], theirs[index]) < limit


def test_bf16_attention_is_that_of_float32_with_a_mask_few_keys_or_other_arguments() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 80, 8).bfloat16() for _ in range(3))
    mask = torch.randn(80, 80).bfloat16()
    few = {"key": key[:, :, :63], "value": value[:, :, :63]}
    for options in ({}, {"attn_mask": mask}, {"is_causal": True}, {"scale": 0.1}, few):
        arguments = {"query": query, "key": key, "value": value} | options
        results = []
        for mode in (FP32Attention(), BF16Attention()):
            with mode:
                results.append(F.scaled_dot_product_attention(**arguments))
        assert torch.equal(*results) == bool(options)
    with BF16Attention():  # positional, as the signature allows
        by_name = F.scaled_dot_product_attention(query, key, value)
        assert torch.equal(F.scaled_dot_product_attention(query, key, value, None, 0.0, False), by_name)
        broadcast = F.scaled_dot_product_attention(query, key[:1], value[:1])
    with FP32Attention():
        assert torch.equal(F.scaled_dot_product_attention(query, key[:1], value[:1]), broadcast)


def test_fp32_attention_and_its_gradients_are_rounded_once() -> None:
    torch.manual_seed(0)
    operands = [torch.randn(2, 3, 7, 8).bfloat16().requires_grad_() for _ in range(3)]
    query, key, value = operands
    mask = torch.randn(7, 7).bfloat16()
    wide = [value.detach().double().requires_grad_() for value in operands]
    with FP32Attention():
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


@pytest.mark.parametrize("fast", [False, True])
def test_every_attention_of_a_transformer_runs_in_the_faster_arithmetic(
    architecture: str, folder: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16_attention, "has_fast_bf16_products", lambda: fast)
    monkeypatch.setattr(bf16_attention, "_LEAST_KEYS", 1)
    model = load_nano(architecture, folder)
    calls: set[tuple[bool, torch.dtype]] = set()  # whether with a mask
    attention, in_bf16 = torch._C._nn.scaled_dot_product_attention, bf16_attention.attention_in_bf16

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is attention:
                mask = args[3] if len(args) > 3 else (kwargs or {}).get("attn_mask")
                calls.add((mask is not None, (args[0] if args else kwargs["query"]).dtype))
            return func(*args, **(kwargs or {}))

    def watch(query: Tensor, *others: Any) -> Tensor:
        calls.add((False, query.dtype))
        return in_bf16(query, *others)

    monkeypatch.setattr(bf16_attention, "attention_in_bf16", watch)
    x, conditioning = model.noise(torch.tensor([1, 2])), model.encode(prompts_of(["a", "b"]))
    with torch.no_grad(), Watch():
        model.velocity(model.transformer, x, torch.tensor(0.5), conditioning)
    assert calls and calls <= {(False, torch.bfloat16 if fast else torch.float32), (True, torch.float32)}
