"""FP8 (E4M3) linear layers: native by PyTorch's row-wise scaled product, and emulated.

Both multiply exact E4M3 numbers and sum in FP32. The native product rounds the result to BF16; on compute capability
9.0 it also keeps fewer bits while summing (``use_fast_accum``, which PyTorch's FP8 inference sets too).
"""

import torch
from torch import Tensor

from solrl_lightning.quantization.cached_quantizer import CachedQuantizer
from solrl_lightning.quantization.nvfp4 import E4M3_MAX, round_e4m3
from solrl_lightning.quantization.rowwise import EmulatedRowwiseLinear, RowwiseLinear, row_scale

E4M3 = torch.float8_e4m3fn


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return E4M3 numbers [..., D] of x [..., D] in `dtype`, which must represent them, and FP32 scales [..., 1]."""
    x = x.float()
    scale = row_scale(x, E4M3_MAX)
    # x / scale may exceed 448 by its rounding, and a cast to E4M3 does not saturate everywhere.
    scaled = (x / scale).clamp_(-E4M3_MAX, E4M3_MAX)
    return (scaled.to(dtype) if dtype == E4M3 else round_e4m3(scaled).to(dtype)), scale


def scaled_product(codes: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return BF16 [M, N]: codes [M, D] * scale [M, 1] times (weight [N, D] * weight_scale [N])^T, plus a BF16 bias."""
    # Not F.scaled_mm: torch 2.11 cannot compile it (`fullgraph`), and in 2.15 its fake tensors check no scales.
    return torch._scaled_mm(
        codes, weight.t(), scale, weight_scale.unsqueeze(0), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


class FP8Linear(RowwiseLinear):
    """Linear layer on FP8 units; stores 8 bits per weight."""

    feature_multiples = (16, 16)  # required by torch._scaled_mm
    quantized = CachedQuantizer(quantize)

    @staticmethod
    def code_dtype(device: torch.device) -> torch.dtype:
        return E4M3

    def product(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()  # row-wise scaling accepts no other dtype
        return scaled_product(codes, self.codes, scale, self.weight_scale, bias).to(dtype)


class EmulatedFP8Linear(EmulatedRowwiseLinear):
    """Linear layer on any device; stores E4M3 numbers in 16 or 32 bits."""

    quantized = CachedQuantizer(quantize)
