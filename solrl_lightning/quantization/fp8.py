"""FP8 (E4M3) linear layers: by PyTorch's row-wise scaled product, and the same numbers without FP8 units.

The emulation multiplies the exact E4M3 numbers in FP32 (BF16 on a GPU, which holds them exactly) and sums in FP32. The
hardware sums in FP32, too, but rounds the result to BF16; on compute capability 9.0 it keeps fewer bits in between
(``use_fast_accum``), which PyTorch's own FP8 inference uses as well.
"""

import torch
from torch import Tensor

from solrl_lightning.quantization.last_input import LastInput
from solrl_lightning.quantization.nvfp4 import E4M3_MAX, round_e4m3
from solrl_lightning.quantization.rowwise import EmulatedRowwiseLinear, RowwiseLinear, row_scale

E4M3 = torch.float8_e4m3fn


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., D] -> E4M3 numbers [..., D] in `dtype`, which must hold them exactly, and FP32 scales [..., 1]."""
    x = x.float()
    scale = row_scale(x, E4M3_MAX)
    # x / scale may exceed 448 by its rounding, and a cast to E4M3 does not saturate everywhere.
    scaled = (x / scale).clamp_(-E4M3_MAX, E4M3_MAX)
    return (scaled.to(dtype) if dtype == E4M3 else round_e4m3(scaled).to(dtype)), scale


def scaled_product(codes: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """codes [M, D] with scale [M, 1] times weight [N, D] with weight_scale [N], plus a BF16 bias [N] -> BF16 [M, N]."""
    # Not F.scaled_mm: torch 2.11 cannot compile it (`fullgraph`), and in 2.15 its fake tensors check no scales.
    return torch._scaled_mm(
        codes,
        weight.t(),
        scale,
        weight_scale.unsqueeze(0),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


class FP8Linear(RowwiseLinear):
    """On FP8 units; the layer holds 8 bits a weight."""

    multiples = (16, 16)  # of torch._scaled_mm
    quantized = LastInput(quantize)

    @staticmethod
    def code_dtype(device: torch.device) -> torch.dtype:
        return E4M3

    def product(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()  # the only dtype that row-wise scaling takes
        return scaled_product(codes, self.codes, scale, self.weight_scale, bias).to(dtype)


class EmulatedFP8Linear(EmulatedRowwiseLinear):
    """On any device; the layer holds the E4M3 numbers in 16 or 32 bits."""

    quantized = LastInput(quantize)
