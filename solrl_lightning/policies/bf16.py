"""Products of bfloat16 matrices on a CPU: in float32 on widened operands, or in bfloat16 where that is clearly faster.

Both have the same result up to rounding. Products in bfloat16 take .23 of the time of float32 on an AMD EPYC with
AVX512_BF16, and 1.3 to 1.8 times as long on an Intel Xeon with AVX512_BF16 and no AMX, so the choice is measured once
per process. Processes of one machine must choose alike, however busy it is: a resumed run is exact.
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
    """Return whether this CPU multiplies matrices clearly faster in bfloat16 than in float32 on widened operands."""
    x, weight = (torch.ones(rows, 256, dtype=torch.bfloat16) for rows in (2048, 512))
    return is_clearly_faster(lambda: F.linear(x, weight), lambda: F.linear(x.float(), weight.float()).to(x.dtype))


@torch.enable_grad()
def is_clearly_faster(first: Callable[[], Any], second: Callable[[], Any]) -> bool:
    """Return whether ``first`` takes at most half of the CPU time of ``second``; both may compute gradients.

    The least time of each counts, in this thread.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for call, timings in zip((first, second), seconds, strict=True):
            start = time.thread_time()
            call()
            timings.append(time.thread_time() - start)
    return 2 * min(seconds[0]) < min(seconds[1])


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
