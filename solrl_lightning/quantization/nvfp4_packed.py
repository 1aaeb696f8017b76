"""NVFP4 linear layers by PyTorch's block-scaled product (compute capability 10.0 and newer), 4.5 bits per weight.

For GPUs without Transformer Engine. Codes and scales of weight and input equal the emulation's bit for bit. The
product sums e2m1 * block_scale in FP32 and rounds the sum to BF16; both global scales (one per row of the input) and
the bias are applied to it. Not yet run on such a GPU; checked against PyTorch's shape rules.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solrl_lightning.policies.compilation import can_compile
from solrl_lightning.quantization.linear import BufferedLinear
from solrl_lightning.quantization.nvfp4 import BLOCK, encode

Operand = tuple[Tensor, Tensor, Tensor]  # packed [M, D / 2], swizzled block scales, row scales [M, 1]

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


def encode_rows(x: Tensor) -> Operand:
    """Return codes [M, D / 2], swizzled block scales and FP32 scales [M, 1] of x [M, D]."""
    packed, block_scales, row_scales = encode(x, per_row=True)
    return packed, swizzle(block_scales), row_scales


def encoder(device: torch.device) -> Callable[[Tensor], Operand]:
    """Return ``encode_rows``, on a GPU as one kernel."""
    if device.type != "cuda" or not can_compile(device):
        return encode_rows
    from solrl_lightning.quantization import nvfp4_kernel  # Triton comes with PyTorch for CUDA only

    return nvfp4_kernel.encode_rows


def scaled_product(packed: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Return BF16 [M, N] of codes [M, D / 2] and [N, D / 2] with swizzled block scales, without the global scales."""
    # Not F.scaled_mm: see scaled_linear.scaled_product. An FP32 result would be written and read once more.
    return torch._scaled_mm(
        packed.view(E2M1X2), weight.view(E2M1X2).t(), scales, weight_scales, out_dtype=torch.bfloat16
    )


class PackedNVFP4Linear(BufferedLinear):
    """Linear layer with W and x in NVFP4, W packed."""

    feature_multiples = (2 * BLOCK, BLOCK)  # torch._scaled_mm requires rows aligned to 16 bytes, 32 codes

    packed: Tensor  # uint8 [out, in / 2]
    block_scales: Tensor  # float8_e4m3fn, swizzled
    weight_scale: Tensor  # float32 [], the weight's global scale

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.encode_rows = encoder(linear.weight.device)

    def quantized_weight(self, weight: Tensor) -> dict[str, Tensor]:
        packed, block_scales, weight_scale = encode(weight)
        return {"packed": packed, "block_scales": swizzle(block_scales), "weight_scale": weight_scale}

    def forward(self, x: Tensor) -> Tensor:
        packed, scales, row_scales = self.encode_rows(x.flatten(0, -2))
        y = scaled_product(packed, scales, self.packed, self.block_scales) * (row_scales * self.weight_scale)
        return (y if self.bias is None else y + self.bias).to(x.dtype).unflatten(0, x.shape[:-1])
