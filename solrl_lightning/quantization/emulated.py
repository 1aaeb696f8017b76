"""NVFP4 linear layers on hardware without FP4 units: the numerics of the format, not its speed or memory.

The layer computes what Blackwell computes: it quantises weight and activation to NVFP4 (the activation at every call,
one global scale per row), accumulates the exact products e2m1 * block_scale in FP32, applies both global scales and the
bias to the FP32 sum, and rounds once to the dtype of the input. Only the order of the FP32 sums differs.

The weight is stored as e2m1 * block_scale values (exact in FP32 and BF16): 2 or 4 bytes per weight instead of 4.5 bits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from solrl_lightning.policies.bf16 import has_fast_bf16_products
from solrl_lightning.quantization.cached_quantizer import CachedQuantizer
from solrl_lightning.quantization.linear import QuantizedLinear
from solrl_lightning.quantization.nvfp4 import BLOCK, fake_quantize


def operand_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which operands of the emulated product are stored and multiplied on `device`.

    CUDA multiplies BF16 operands into FP32. A CPU with BF16 units rounds the product to BF16 before the scales are
    applied (2^-9 relative, where NVFP4 rounds operands by up to 2^-2). Other CPUs multiply in FP32, which is several
    times faster there.
    """
    if device.type == "cuda" or (device.type == "cpu" and has_fast_bf16_products()):
        return torch.bfloat16
    return torch.float32


_quantized = CachedQuantizer(partial(fake_quantize, per_row=True))


class NVFP4Linear(QuantizedLinear):
    """Linear layer with W and x in NVFP4, stored as FP32 or BF16 numbers."""

    feature_multiples = (BLOCK, 1)

    weight_values: Tensor  # [out, in] e2m1 * block_scale
    weight_scale: Tensor  # float32 [], the weight's global scale
    bias: Tensor | None  # float32 [out]

    def __init__(self, in_features: int, out_features: int, bias: bool, device: torch.device) -> None:
        super().__init__(in_features, out_features, bias, device)
        values = torch.zeros(out_features, in_features, dtype=operand_dtype(device), device=device)
        self.register_buffer("weight_values", values)
        self.register_buffer("weight_scale", torch.zeros((), device=device))
        self.register_buffer("bias", torch.zeros(out_features, device=device) if bias else None)

    @torch.no_grad()
    def requantize_(self, weight: Tensor, bias: Tensor | None = None) -> None:
        values, scale = fake_quantize(weight, self.weight_values.dtype)
        self.weight_values.copy_(values)
        self.weight_scale.copy_(scale)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        values, scale = _quantized(x, self.weight_values.dtype)
        y = product(values, self.weight_values).mul_(scale * self.weight_scale)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [..., in] times weight [out, in] as FP32 [..., out]; only CUDA's BF16 product returns its FP32 sums."""
    if x.device.type == "cuda":
        return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).unflatten(0, x.shape[:-1])
    return F.linear(x, weight).float()
