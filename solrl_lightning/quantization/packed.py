"""NVFP4 linear layers by PyTorch's block-scaled product (compute capability 10.0 and newer), 4.5 bits per weight.

For GPUs without Transformer Engine. ``nvfp4`` quantises weight and input, so codes and scales equal those of the
emulation bit for bit. The product sums e2m1 * block_scale in FP32; both global scales (one per row of the input) and
the bias are applied to the sum. Not yet run on such a GPU; checked against PyTorch's shape rules.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from solrl_lightning.quantization.linear import BufferedLinear
from solrl_lightning.quantization.nvfp4 import BLOCK, NVFP4Tensor, encode

E2M1X2 = torch.float4_e2m1fn_x2
_TILE = (128, 4)  # rows and block scales of a tile


def swizzle(scales: Tensor) -> Tensor:
    """Return block scales [M, D / 16] flattened in the order in which tensor cores read them.

    Tiles of 128 x 4 scales, padded with zeros; in a tile the scales of rows r, r + 32, r + 64, r + 96 are adjacent:
    https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    rows, columns = scales.shape
    # F.pad does not support float8_e4m3fn, so the bytes are padded.
    padded = F.pad(scales.view(torch.uint8), (0, -columns % _TILE[1], 0, -rows % _TILE[0]))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4))  # [row tile, r / 32, r % 32, column tile, 4]
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e4m3fn)


def scaled_product(x: NVFP4Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Return x [M, D] times `packed` [N, D / 2] with swizzled `scales`: FP32 [M, N], without the global scales."""
    # Not F.scaled_mm: see scaled_linear.scaled_product.
    return torch._scaled_mm(
        x.packed.view(E2M1X2), packed.view(E2M1X2).t(), swizzle(x.block_scales), scales, out_dtype=torch.float32
    )


class PackedNVFP4Linear(BufferedLinear):
    """Linear layer with W and x in NVFP4, W packed."""

    feature_multiples = (2 * BLOCK, BLOCK)  # torch._scaled_mm requires rows aligned to 16 bytes, 32 codes

    packed: Tensor  # uint8 [out, in / 2]
    block_scales: Tensor  # float8_e4m3fn, swizzled
    weight_scale: Tensor  # float32 [], the weight's global scale

    def quantized_weight(self, weight: Tensor) -> dict[str, Tensor]:
        packed, block_scales, weight_scale = encode(weight)
        return {"packed": packed, "block_scales": swizzle(block_scales), "weight_scale": weight_scale}

    def forward(self, x: Tensor) -> Tensor:
        quantized = encode(x.flatten(0, -2), per_row=True)
        y = scaled_product(quantized, self.packed, self.block_scales) * (quantized.global_scale * self.weight_scale)
        return (y if self.bias is None else y + self.bias).to(x.dtype).unflatten(0, x.shape[:-1])
