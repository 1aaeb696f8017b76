"""Quantise the input of an NVFP4 product in one pass over it, by a Triton kernel.

A row is read once and stays in registers: its largest magnitude, the block scales, the codes. The operations and their
order are as in ``nvfp4.encode`` with ``per_row=True``, so the results are equal bit for bit. As separate PyTorch
operations, compiled, the same takes four kernels and writes the values as FP32.

Import this module only where Triton is installed, as PyTorch for CUDA has it. Not yet run on a GPU; tests run it in
Triton's interpreter.

Shapes: M rows of D values, D a multiple of 32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from solrl_lightning.quantization.nvfp4 import BLOCK

TILE_ROWS, TILE_COLUMNS = 128, 4  # block scales of a tile; nvfp4_packed.swizzle
_VALUES_PER_WARP = 1024  # 32 of them in the registers of a thread


@triton_op("solrl_lightning::encode_rows", mutates_args=())
def encode_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return uint8 codes [M, D / 2], E4M3 block scales in the order of ``swizzle``, and FP32 scales [M, 1]."""
    x = x.contiguous()
    rows, width = x.shape
    padded_rows = triton.cdiv(rows, TILE_ROWS) * TILE_ROWS
    columns = triton.cdiv(width // BLOCK, TILE_COLUMNS) * TILE_COLUMNS
    packed = torch.empty(rows, width // 2, dtype=torch.uint8, device=x.device)
    block_scales = torch.empty(padded_rows * columns, dtype=torch.float8_e4m3fn, device=x.device)
    row_scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    size = max(triton.next_power_of_2(width), BLOCK * TILE_COLUMNS)
    warps = min(max(size // _VALUES_PER_WARP, 1), 16)
    wrap_triton(encode_row)[(padded_rows,)](
        x, packed, block_scales, row_scales, rows, width, columns, SIZE=size, num_warps=warps
    )
    return packed, block_scales, row_scales


@triton.jit
def encode_row(x, packed, block_scales, row_scales, rows, width, columns, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Encode row ``program_id(0)``; one after the last of ``rows`` has block scales of zero.

    Fused multiply-adds change nothing, because every product that enters a sum is exact.
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.multiple_of(tl.where(row < rows, width, 0), 32)  # of values
    index = tl.arange(0, SIZE)
    values = tl.load(x + row * width + index, mask=index < count, other=0.0).to(tl.float32)
    blocks = tl.reshape(values, [SIZE // 16, 16])
    # As integers, magnitudes keep their order, and NaN is the largest.
    block_bits = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    block_amax = block_bits.to(tl.float32, bitcast=True)
    amax = tl.max(block_bits, axis=0).to(tl.float32, bitcast=True)

    largest = 3.4028234663852886e38
    encode = tl.minimum(tl.div_rn(2688.0, amax), largest)
    decode = tl.div_rn(1.0, encode)
    scale = tl.minimum(block_amax * (encode * (1 / 6)), 448.0)
    power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, 0.015625) * 1572864.0  # nvfp4.round_e4m3
    scale = (scale + shift) - shift
    factor = tl.minimum(tl.div_rn(1.0, scale * decode), largest)

    scaled = tl.clamp(blocks * factor[:, None], -6.0, 6.0)
    spacing = (tl.floor(0.5 * scaled) + 0.5) * 9437184.0  # nvfp4.round_e2m1
    magnitude = tl.abs((scaled + spacing) - spacing)
    code = tl.minimum(tl.minimum(2 * magnitude, magnitude + 2), 0.5 * magnitude + 4).to(tl.int32)
    code = code | ((blocks.to(tl.int32, bitcast=True) >> 28) & 8)  # the sign bit
    low, high = tl.split(tl.reshape(code, [SIZE // 2, 2]))
    pair = tl.arange(0, SIZE // 2)
    tl.store(packed + row * (width // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=pair < count // 2)

    column = tl.arange(0, SIZE // 16)
    tile = (row // 128) * (columns // 4) + column // 4
    place = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
    tl.store(block_scales + place, scale.to(tl.float8e4nv), mask=column < columns)
    row_scale = tl.maximum(tl.div_rn(amax, 2688.0), 2.938735877055719e-39, propagate_nan=tl.PropagateNan.ALL)
    tl.store(row_scales + row, row_scale, mask=row < rows)
