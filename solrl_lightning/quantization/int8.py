"""INT8 linear layers (W8A8): by PyTorch's integer product, and the same numbers without INT8 units.

A sum of in_features products of two codes is an integer below 127 * 127 * in_features. The hardware adds it up in
32 bits; FP32 holds it exactly up to in_features = 1040, and beyond it rounds like any FP32 product. So without INT8
units it is a product of FP32 matrices that hold integers.

PyTorch's other integer kernels do not serve there. On a CPU without VNNI oneDNN's (`torch.ops.onednn`) adds pairs of
products in 16 bits, which overflow, and takes its packed weight for a constant of the compiled graph, so that it cannot
be refreshed; `quantized::linear_dynamic` has one scale for all tokens, and its weights are of a deprecated kind.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from solrl_lightning.quantization.last_input import LastInput
from solrl_lightning.quantization.rowwise import EmulatedRowwiseLinear, RowwiseLinear, row_scale

LARGEST = 127.0  # symmetric: -128 is not used
_FEWEST_ROWS = 32  # a GPU's integer product needs more than 16


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., D] -> integers [..., D] in `dtype`, which must hold them exactly, and FP32 scales [..., 1]."""
    x = x.float()
    scale = row_scale(x, LARGEST)
    return (x / scale).round_().to(dtype), scale


class INT8Linear(RowwiseLinear):
    """On INT8 units; the layer holds 8 bits a weight."""

    multiples = (8, 8)  # of torch._int_mm on a GPU
    quantized = LastInput(quantize)

    @staticmethod
    def code_dtype(device: torch.device) -> torch.dtype:
        return torch.int8

    def product(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        rows = len(codes)
        if rows < _FEWEST_ROWS:
            codes = F.pad(codes, (0, 0, 0, _FEWEST_ROWS - rows))
        return self.scaled(torch._int_mm(codes, self.codes.t())[:rows], scale, dtype)


class EmulatedINT8Linear(EmulatedRowwiseLinear):
    """On any device; the layer holds the integers in 16 or 32 bits."""

    quantized = LastInput(quantize)
