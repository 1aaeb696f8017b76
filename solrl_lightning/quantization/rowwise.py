"""FP8 and INT8 linear layers: one scale for each token of the input and for each output row of the weight.

    scale = max(amax, 1e-12) / largest      amax over a row; largest = 448 for E4M3, 127 for INT8
    code  = round(x / scale)                to nearest, ties to even, onto the numbers of the format
    y     = (codes_x codes_w^T) * scale_x * scale_w + bias

The input is quantised at every call, so a token's numbers depend on no other token, and not on the batch. A subclass
says what its codes are and how they are multiplied: ``fp8`` and ``int8`` have one for hardware with such units and one
that computes the same numbers with others.

Weights are stored as codes, in 8 bits where the hardware multiplies them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from solrl_lightning.quantization.emulated import operand_dtype, product
from solrl_lightning.quantization.last_input import LastInput
from solrl_lightning.quantization.linear import QuantizedLinear

_SMALLEST_AMAX = 1e-12  # so that a row of zeros gives zeros


def row_scale(x: Tensor, largest: float) -> Tensor:
    """[..., D] FP32 -> [..., 1]."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    # A number over a tensor would be rounded twice, as number * reciprocal.
    return torch.maximum(high, -low).clamp(min=_SMALLEST_AMAX) / torch.full_like(high, largest)


class RowwiseLinear(QuantizedLinear):
    """With W and x as 8-bit codes."""

    quantized: ClassVar[LastInput]
    """x [..., D] -> codes [..., D] in a dtype and FP32 scales [..., 1]."""

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
        """In which codes are stored and multiplied on `device`."""

    @abstractmethod
    def product(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """codes [M, in], scale [M, 1] -> y [M, out] in `dtype`."""

    @torch.no_grad()
    def refresh(self, weight: Tensor, bias: Tensor | None = None) -> None:
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
        """Sums of code products [M, out] -> y, rounded once."""
        y = sums.float().mul_(scale).mul_(self.weight_scale)
        return (y if self.bias is None else y.add_(self.bias)).to(dtype)


class EmulatedRowwiseLinear(RowwiseLinear):
    """On any device: the same codes, held as numbers of the dtype that is multiplied there."""

    @staticmethod
    def code_dtype(device: torch.device) -> torch.dtype:
        return operand_dtype(device)

    def product(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return self.scaled(product(codes, self.codes), scale, dtype)
