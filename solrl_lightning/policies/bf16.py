"""Products of bfloat16 matrices on a CPU: in bfloat16, or in float32 on widened operands, whichever is faster here.

Both have the same result up to rounding. AMX and AVX512_BF16 units make products of bfloat16 matrices faster than those
of float32 on some CPUs and slower on others, so the choice is measured once per process.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ROUNDS = 7  # the least time of each counts; the first round warms up


@cache
def has_fast_bf16_products() -> bool:
    """Return whether this CPU multiplies matrices faster in bfloat16 than in float32 on widened operands."""
    x, weight = (torch.ones(rows, 256, dtype=torch.bfloat16) for rows in (2048, 512))
    return is_faster(lambda: F.linear(x, weight), lambda: F.linear(x.float(), weight.float()).to(x.dtype))


@torch.enable_grad()
def is_faster(first: Callable[[], Any], second: Callable[[], Any]) -> bool:
    """Return whether the least time of ``first`` is below that of ``second``; both may compute gradients.

    Of this thread's CPU, so that processes of one machine decide alike while others keep its cores busy.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for call, timings in zip((first, second), seconds, strict=True):
            start = time.thread_time()
            call()
            timings.append(time.thread_time() - start)
    return min(seconds[0]) < min(seconds[1])


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
