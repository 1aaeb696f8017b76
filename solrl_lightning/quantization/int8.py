"""INT8 linear layers (W8A8): native by PyTorch's integer product, and emulated.

The native product sums in 32-bit integers. The emulation multiplies FP32 matrices of integers: exact up to
in_features = 1040, where a sum of products stays below 2^24, and rounded beyond.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from solrl_lightning.quantization.cached_quantizer import CachedQuantizer
from solrl_lightning.quantization.rowwise import EmulatedRowwiseLinear, RowwiseLinear, row_scale

LARGEST = 127.0  # symmetric: -128 is not used
_FEWEST_ROWS = 32  # torch._int_mm on a GPU requires more than 16


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return integers [..., D] of x [..., D] in `dtype`, which must represent them, and FP32 scales [..., 1]."""
    x = x.float()
    scale = row_scale(x, LARGEST)
    return (x / scale).round_().to(dtype), scale


class INT8Linear(RowwiseLinear):
    """Linear layer on INT8 units; stores 8 bits per weight."""

    feature_multiples = (8, 8)  # required by torch._int_mm on a GPU
    quantized = CachedQuantizer(quantize)

    @staticmethod
    def code_dtype(device: torch.device) -> torch.dtype:
        return torch.int8

    def product(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        rows = len(codes)
        if rows < _FEWEST_ROWS:
            codes = F.pad(codes, (0, 0, 0, _FEWEST_ROWS - rows))
        return self.scaled(torch._int_mm(codes, self.codes.t())[:rows], scale, dtype)


class EmulatedINT8Linear(EmulatedRowwiseLinear):
    """Linear layer on any device; stores the integers in 16 or 32 bits."""

    quantized = CachedQuantizer(quantize)
