"""The FP8 and INT8 formats as functions of tensors: one FP32 scale per row, everything but the last dimension.

scale = max(amax, 1e-12) / largest      amax over a row; largest = 448 for E4M3, 127 for INT8
value = round(x / scale)                to nearest, ties to even, onto the numbers of the format
"""

import torch
from torch import Tensor

from solrl_lightning.quantization.nvfp4 import E4M3_MAX, round_e4m3

E4M3 = torch.float8_e4m3fn
INT8_MAX = 127.0  # symmetric: -128 is not used
_SMALLEST_AMAX = 1e-12  # a row of zeros gives zeros


def quantize_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return E4M3 numbers [..., D] of x [..., D] in `dtype`, which must represent them, and FP32 scales [..., 1]."""
    scale = _row_scale(x, E4M3_MAX)
    # x / scale may exceed 448 by its rounding, and a cast to E4M3 does not saturate everywhere.
    scaled = (x.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX)
    return (scaled if dtype == E4M3 else round_e4m3(scaled)).to(dtype), scale


def quantize_int8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return integers [..., D] of x [..., D] in `dtype`, which must represent them, and FP32 scales [..., 1]."""
    scale = _row_scale(x, INT8_MAX)
    return (x.float() / scale).round_().to(dtype), scale


def _row_scale(x: Tensor, largest: float) -> Tensor:
    # Of x itself: compiled code stores what several operators read, and of x.float() that would be FP32.
    low, high = (limit.float() for limit in x.aminmax(dim=-1, keepdim=True))
    # CUDA computes `tensor / number` as a product with the reciprocal of the number, which rounds twice.
    return torch.maximum(high, -low).clamp(min=_SMALLEST_AMAX) / torch.full_like(high, largest)
