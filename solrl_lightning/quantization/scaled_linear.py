"""Linear layers of values and scales: emulated in every format on any hardware, and native in FP8 and INT8.

    y = (values_x values_w^T) * scale_x * scale_w + bias

The input is quantised at every call with one scale per token, so a token depends on no other token of the batch.

The emulation computes what the hardware computes, neither faster nor smaller than BF16: it multiplies the same values,
stored in BF16 or FP32, sums in FP32 (in another order), applies both scales and the bias to the sum, and rounds once to
the dtype of the input. Sums of INT8 products are exact up to in_features = 1040, where they stay below 2^24.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from solrl_lightning.policies.bf16 import has_fast_bf16_products
from solrl_lightning.quantization.linear import BufferedLinear
from solrl_lightning.quantization.nvfp4 import BLOCK, fake_quantize
from solrl_lightning.quantization.rowwise import E4M3, quantize_fp8, quantize_int8

_FEWEST_ROWS = 32  # torch._int_mm on a GPU requires more than 16

Quantized = tuple[Tensor, Tensor]  # values or codes, and scale


def operand_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which operands of the emulated product are stored and multiplied on `device`.

    CUDA multiplies BF16 operands into FP32. A CPU with BF16 units rounds the product to BF16 before the scales are
    applied (2^-9 relative, where NVFP4 rounds operands by up to 2^-2). Other CPUs multiply in FP32, which is several
    times faster there.
    """
    if device.type == "cuda" or (device.type == "cpu" and has_fast_bf16_products()):
        return torch.bfloat16
    return torch.float32


class CachedQuantizer:
    """Quantise a tensor once for all layers that read it, as to_q, to_k and to_v do: the last ``quantize(x, dtype)``.

    The result is freed with x.

    Caches in eager mode only, where quantising costs more than the product of a narrow layer. Compiled code quantises
    once for each layer: Inductor fuses the quantisers of one tensor into one kernel, which stores a result for each.
    """

    def __init__(self, quantize: Callable[[Tensor, torch.dtype], Quantized]) -> None:
        self.quantize = quantize
        self.x: Callable[[], Tensor | None] = lambda: None
        self.version, self.dtype = 0, torch.float32
        self.result: Quantized | None = None

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Quantized:
        # Inference tensors have no version counter, so an in-place change would go unnoticed.
        if torch.compiler.is_compiling() or x.is_inference():
            return self.quantize(x, dtype)
        if self.result is None or self.x() is not x or self.version != x._version or self.dtype != dtype:
            self.result = None  # free the old one first
            self.x, self.version, self.dtype = weakref.ref(x, self._forget), x._version, dtype
            self.result = self.quantize(x, dtype)
        return self.result

    def _forget(self, x: weakref.ref[Tensor]) -> None:
        self.result = None


class ScaledLinear(BufferedLinear):
    """Linear layer with W and x as values and scales. Subclasses choose the format; without ``dtype`` they emulate."""

    dtype: ClassVar[torch.dtype | None] = None  # of values; None: ``operand_dtype``
    quantize_input: ClassVar[CachedQuantizer]

    weight_values: Tensor  # [out, in]
    weight_scale: Tensor  # float32 [out]; NVFP4: []

    @staticmethod
    @abstractmethod
    def quantize_weight(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return values [out, in] of x [out, in] in `dtype`, and FP32 scales [out, 1], or [] for one scale."""

    def quantized_weight(self, weight: Tensor) -> dict[str, Tensor]:
        values, scale = self.quantize_weight(weight, self.dtype or operand_dtype(weight.device))
        return {"weight_values": values, "weight_scale": scale.squeeze(-1)}

    def forward(self, x: Tensor) -> Tensor:
        values, scale = self.quantize_input(x, self.weight_values.dtype)
        y = self.product(values.flatten(0, -2), scale.flatten(0, -2))
        return y.to(x.dtype).unflatten(0, x.shape[:-1])

    def product(self, values: Tensor, scale: Tensor) -> Tensor:
        """Return y [M, out], in FP32 or BF16, of values [M, in] and scale [M, 1]."""
        y = self.rescale_(self.sums(values), scale)
        return y if self.bias is None else y.add_(self.bias)

    def sums(self, values: Tensor) -> Tensor:
        """Return FP32 [M, out], the product of values [M, in] and the weight's values."""
        if values.device.type == "cuda" and values.dtype == torch.bfloat16:  # only CUDA returns the FP32 sums
            return torch.mm(values, self.weight_values.t(), out_dtype=torch.float32)
        return F.linear(values, self.weight_values).float()

    def rescale_(self, sums: Tensor, scale: Tensor) -> Tensor:
        return sums.mul_(scale).mul_(self.weight_scale)


class NVFP4Linear(ScaledLinear):
    """Emulated NVFP4; a value is e2m1 * block_scale, and the weight has one scale."""

    feature_multiples = (BLOCK, 1)
    quantize_weight = staticmethod(fake_quantize)
    quantize_input = CachedQuantizer(partial(fake_quantize, per_row=True))

    def rescale_(self, sums: Tensor, scale: Tensor) -> Tensor:
        return sums.mul_(scale * self.weight_scale)


class EmulatedFP8Linear(ScaledLinear):
    """Emulated FP8 (E4M3)."""

    quantize_weight = staticmethod(quantize_fp8)
    quantize_input = CachedQuantizer(quantize_fp8)


class FP8Linear(EmulatedFP8Linear):
    """FP8 by PyTorch's row-wise scaled product, 8 bits per weight.

    The product rounds the result to BF16; on compute capability 9.0 it also keeps fewer bits while summing
    (``use_fast_accum``, which PyTorch's FP8 inference sets too).
    """

    feature_multiples = (16, 16)  # required by torch._scaled_mm
    dtype = E4M3
    bias_dtype = torch.bfloat16  # row-wise scaling accepts no other

    def product(self, values: Tensor, scale: Tensor) -> Tensor:
        return scaled_product(values, self.weight_values, scale, self.weight_scale, self.bias)


def scaled_product(values: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return BF16 [M, N]: values [M, D] * scale [M, 1] times (weight [N, D] * weight_scale [N])^T, plus a BF16 bias."""
    # Not F.scaled_mm: torch 2.11 cannot compile it (`fullgraph`), and in 2.15 its fake tensors check no scales.
    return torch._scaled_mm(
        values, weight.t(), scale, weight_scale.unsqueeze(0), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


class EmulatedINT8Linear(ScaledLinear):
    """Emulated INT8."""

    quantize_weight = staticmethod(quantize_int8)
    quantize_input = CachedQuantizer(quantize_int8)


class INT8Linear(EmulatedINT8Linear):
    """INT8 (W8A8) by PyTorch's integer product, which sums in 32-bit integers; 8 bits per weight."""

    feature_multiples = (8, 8)  # required by torch._int_mm on a GPU
    dtype = torch.int8

    def sums(self, values: Tensor) -> Tensor:
        rows = len(values)
        if rows < _FEWEST_ROWS:
            values = F.pad(values, (0, 0, 0, _FEWEST_ROWS - rows))
        return torch._int_mm(values, self.weight_values.t())[:rows].float()
