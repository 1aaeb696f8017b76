"""NVFP4 linear layers by PyTorch's own block-scaled product (compute capability 10.0 and newer), packed in 4.5 bits.

For such hardware without Transformer Engine. Weight and input are quantised by the functions of ``nvfp4``, so that
codes and scales are those of the emulation to the bit; the product sums e2m1 * block_scale in FP32, then both global
scales (the input has one for each row) and the bias are applied. Quantising the input takes several passes over it even
when compiled, where Transformer Engine has a kernel. Checked against PyTorch's shape rules, not yet on such a GPU.

Left out: torchao.prototype.mx_formats, which has the same product in a tensor subclass that it calls a prototype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from solrl_lightning.quantization.linear import QuantizedLinear
from solrl_lightning.quantization.nvfp4 import BLOCK, NVFP4Tensor, encode

E2M1X2 = torch.float4_e2m1fn_x2
_TILE = (128, 4)  # rows and block scales of a tile


def swizzle(scales: Tensor) -> Tensor:
    """[M, D / 16] block scales -> flat, in the order in which tensor cores read them.

    Tiles of 128 x 4 scales, padded with zeros; in a tile the scales of rows r, r + 32, r + 64, r + 96 stand together:
    https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    rows, columns = scales.shape
    # E4M3 has no padding of its own; its bytes do.
    padded = F.pad(scales.view(torch.uint8), (0, -columns % _TILE[1], 0, -rows % _TILE[0]))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4))  # [row tile, r / 32, r % 32, column tile, 4]
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e4m3fn)


def scaled_product(x: NVFP4Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x [M, D] times a weight, `packed` [N, D / 2] with swizzled `scales` -> FP32 [M, N], global scales apart."""
    # Not F.scaled_mm: see fp8.scaled_product.
    return torch._scaled_mm(
        x.packed.view(E2M1X2), packed.view(E2M1X2).t(), swizzle(x.block_scales), scales, out_dtype=torch.float32
    )


class PackedNVFP4Linear(QuantizedLinear):
    """With W and x in NVFP4, W packed."""

    multiples = (2 * BLOCK, BLOCK)  # 32 inputs are the 16 bytes to which a row of codes must be aligned

    packed: Tensor  # uint8 [out, in / 2]
    block_scales: Tensor  # float8_e4m3fn, swizzled
    weight_scale: Tensor  # float32 [], the weight's global scale
    bias: Tensor | None  # float32 [out]

    def __init__(self, in_features: int, out_features: int, bias: bool, device: torch.device) -> None:
        super().__init__(in_features, out_features, bias, device)
        scales = torch.zeros(out_features, in_features // BLOCK, device=device).to(torch.float8_e4m3fn)
        packed = torch.zeros(out_features, in_features // 2, dtype=torch.uint8, device=device)
        self.register_buffer("packed", packed)
        self.register_buffer("block_scales", swizzle(scales))
        self.register_buffer("weight_scale", torch.zeros((), device=device))
        self.register_buffer("bias", torch.zeros(out_features, device=device) if bias else None)

    @torch.no_grad()
    def refresh(self, weight: Tensor, bias: Tensor | None = None) -> None:
        quantized = encode(weight)
        self.packed.copy_(quantized.packed)
        self.block_scales.copy_(swizzle(quantized.block_scales))
        self.weight_scale.copy_(quantized.global_scale)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        quantized = encode(x.flatten(0, -2), per_row=True)
        y = scaled_product(quantized, self.packed, self.block_scales) * (quantized.global_scale * self.weight_scale)
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).unflatten(0, x.shape[:-1])
