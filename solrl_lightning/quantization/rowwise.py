"""FP8 and INT8 linear layers with one scale per token of the input and one per output row of the weight.

    scale = max(amax, 1e-12) / largest      amax over a row; largest = 448 for E4M3, 127 for INT8
    code  = round(x / scale)                to nearest, ties to even, onto the numbers of the format
    y     = (codes_x codes_w^T) * scale_x * scale_w + bias

The input is quantised at every call, so a token depends on no other token of the batch. Subclasses define the codes and
their product; ``fp8`` and ``int8`` have a native one, which stores codes in 8 bits, and an emulated one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from solrl_lightning.quantization.cached_quantizer import CachedQuantizer
from solrl_lightning.quantization.emulated import operand_dtype, product
from solrl_lightning.quantization.linear import QuantizedLinear

_SMALLEST_AMAX = 1e-12  # a row of zeros gives zeros


def row_scale(x: Tensor, largest: float) -> Tensor:
    """Return the scale [..., 1] of each row of x [..., D], FP32."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    # CUDA computes `tensor / number` as a product with the reciprocal of the number, which rounds twice.
    return torch.maximum(high, -low).clamp(min=_SMALLEST_AMAX) / torch.full_like(high, largest)


class RowwiseLinear(QuantizedLinear):
    """Linear layer with W and x as 8-bit codes."""

    quantized: ClassVar[CachedQuantizer]
    """(x [..., D], dtype) -> codes [..., D] in that dtype and FP32 scales [..., 1]."""

    codes: Tensor  # [out, in]
    weight_scale: Tensor  # float32 [out]
    bias: Tensor | None  # float32 [out]

    def __init__(self, in_features: int, out_features: int, bias: bool, device: torch.device) -> None:
        super().__init__(in_features, out_features, bias, device)
        codes = torch.zeros(out_features, in_features, dtype=self.code_dtype(device), device=device)
        self.register_buffer("codes", codes)
        self.register_buffer("weight_scale", torch.zeros(out_features, device=device))
        self.register_buffer("bias", torch.zeros(out_features, device=device) if bias else None)

    @staticmethod
    @abstractmethod
    def code_dtype(device: torch.device) -> torch.dtype:
        """Return the dtype in which codes are stored and multiplied on `device`."""

    @abstractmethod
    def product(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return y [M, out] in `dtype` of codes [M, in] with scale [M, 1]."""

    @torch.no_grad()
    def requantize_(self, weight: Tensor, bias: Tensor | None = None) -> None:
        codes, scale = self.quantized.quantize(weight, self.codes.dtype)
        self.codes.copy_(codes)
        self.weight_scale.copy_(scale.squeeze(-1))
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = self.quantized(x, self.codes.dtype)
        y = self.product(codes.flatten(0, -2), scale.flatten(0, -2), x.dtype)
        return y.unflatten(0, x.shape[:-1])

    def scaled(self, sums: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return y from sums of code products [M, out], rounded once."""
        y = sums.float().mul_(scale).mul_(self.weight_scale)
        return (y if self.bias is None else y.add_(self.bias)).to(dtype)


class EmulatedRowwiseLinear(RowwiseLinear):
    """Linear layer on any device, with the same codes stored in ``operand_dtype``."""

    @staticmethod
    def code_dtype(device: torch.device) -> torch.dtype:
        return operand_dtype(device)

    def product(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return self.scaled(product(codes, self.codes), scale, dtype)
