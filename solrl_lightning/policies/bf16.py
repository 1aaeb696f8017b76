"""Arithmetic of bfloat16 tensors on a CPU: in bfloat16, or in float32 on widened operands, whichever is faster here.

Both have the same result up to rounding. AMX and AVX512_BF16 units make products of bfloat16 matrices faster than those
of float32 on some CPUs and slower on others, and PyTorch's backward pass of attention takes up to ten times as long in
bfloat16 as in float32, so the choice is measured once per process.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_ROUNDS = 7  # the least time of each counts; the first round warms up


@cache
def has_fast_bf16_products() -> bool:
    """Return whether this CPU multiplies matrices faster in bfloat16 than in float32 on widened operands."""
    x, weight = (torch.ones(rows, 256, dtype=torch.bfloat16) for rows in (2048, 512))
    return _is_faster(lambda: F.linear(x, weight), lambda: F.linear(x.float(), weight.float()).to(x.dtype))


@cache
def has_fast_bf16_attention() -> bool:
    """Return whether this CPU computes attention and its gradients faster in bfloat16 than on widened operands."""
    x = torch.ones(16, 4, 32, 32, dtype=torch.bfloat16, requires_grad=True)

    def step(mode: AbstractContextManager[Any]) -> None:
        with mode:
            F.scaled_dot_product_attention(x, x, x).sum().backward()

    return _is_faster(lambda: step(nullcontext()), lambda: step(FP32Attention()))


@torch.enable_grad()
def _is_faster(first: Callable[[], Any], second: Callable[[], Any]) -> bool:
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for call, timings in zip((first, second), seconds, strict=True):
            start = time.perf_counter()
            call()
            timings.append(time.perf_counter() - start)
    return min(seconds[0]) < min(seconds[1])


class FP32Attention(TorchFunctionMode):
    """Context in which ``scaled_dot_product_attention`` runs in float32 and rounds its result once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        dtype = (args[0] if args else kwargs["query"]).dtype
        args, kwargs = tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, (args, kwargs))
        return func(*args, **kwargs).to(dtype)


class BF16Linear(nn.Linear):
    """A linear layer of bfloat16 weights and results whose products run in float32."""

    product_dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)


def use_fp32_products(transformer: nn.Module) -> None:
    """Replace the class of every linear layer of ``transformer`` by `BF16Linear`, in place."""
    for module in transformer.modules():
        if type(module) is nn.Linear:
            module.__class__ = BF16Linear


def use_fp32_attention(transformer: nn.Module) -> None:
    """Replace the class of every attention module of ``transformer``, in place, by one that runs in `FP32Attention`."""
    for module in transformer.modules():
        if hasattr(module, "set_processor") and not hasattr(module, "attn_processors"):  # models have both
            module.__class__ = _with_fp32_attention(type(module))  # type: ignore[arg-type]


@cache
def _with_fp32_attention(attention: type[nn.Module]) -> type[nn.Module]:
    in_own_dtype = attention.forward  # torch.compile cannot trace `attention.forward`: diffusers allows it in the graph

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.attention_mode():
            return in_own_dtype(self, *args, **kwargs)

    return type(attention.__name__, (attention,), {"forward": forward, "attention_mode": FP32Attention})
