"""The NVFP4 format as functions of tensors: quantise, dequantise, and the exact operands of an emulated product.

A value is  e2m1 * block_scale * global_scale:  a 4-bit E2M1 number (0, .5, 1, 1.5, 2, 3, 4, 6 and a sign), one FP8 E4M3
scale for each block of 16 along the last dimension, one FP32 scale for the whole tensor. Everything is rounded to
nearest, ties to even.

``per_row=True`` gives each row (everything but the last dimension) a separate FP32 scale: ``amax`` below is then the
row's. This is used for inputs of layers, because one scale per batch makes a candidate depend on its neighbours.

The FP32 operations and their order are as in Transformer Engine's reference quantiser, by its source (1 x 16 blocks,
no Hadamard transform, no stochastic rounding, no 4over6):

    encode       = min(2688 / amax, FLT_MAX)                  2688 = 448 * 6, the largest E4M3 times the largest E2M1
    block_scale  = e4m3(min(block_amax * (encode * (1/6)), 448))
    code         = e2m1(clamp(x * min(1 / (block_scale * (1 / encode)), FLT_MAX), -6, 6))
    global_scale = amax / 2688

Block scales keep E4M3's subnormals and may round to zero; an all-zero block or tensor gives zeros without a special
case. The sign bit of a code is the sign bit of its x, also for zeros.

Rounding is done by FP32 additions that are exact apart from the wanted rounding, not by tables or FP8 casts: a few
vectorised instructions in eager mode and under torch.compile alike.

Shapes: D last dimension, a multiple of 16.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_FLOAT32_MAX = torch.finfo(torch.float32).max
_EXPONENT_BITS = 0x7F800000


class NVFP4Tensor(NamedTuple):
    """Quantised tensor [..., D]: value = e2m1 * block_scale * global_scale."""

    packed: Tensor  # uint8 [..., D/2], the element of even index in the low nibble
    block_scales: Tensor  # float8_e4m3fn [..., D/16]
    global_scale: Tensor  # float32 [], or [..., 1] with one per row

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return values [..., D], computed in FP32 as e2m1 * (block_scale * global_scale) and cast to `dtype`."""
        table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=self.packed.device)
        codes = torch.stack((self.packed & 0xF, self.packed >> 4), dim=-1).flatten(-2)
        scales = self.block_scales.float() * self.global_scale
        values = table[codes.int()].unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)
        return values.flatten(-2).to(dtype)


def quantize(x: Tensor) -> NVFP4Tensor:
    """Return x [..., D], of any float dtype, in NVFP4.

    Raises:
        ValueError: x is not floating-point, D is no positive multiple of 16, or (in eager mode) a value is not finite.
    """
    _check(x)
    return encode(x)


def encode(x: Tensor, per_row: bool = False) -> NVFP4Tensor:
    """Return ``quantize(x)`` without its checks (the one of finiteness synchronises a GPU); one NaN gives NaNs."""
    blocks = _blocks(x.float())
    scales, encode, global_scale = _scales(blocks, per_row)
    magnitude = round_e2m1(_scale(blocks, encode)).abs()
    # The index in E2M1_VALUES as a piecewise linear function of the value.
    code = torch.minimum(torch.minimum(2 * magnitude, magnitude + 2), 0.5 * magnitude + 4).to(torch.uint8)
    code = torch.where(blocks.signbit(), code | 8, code).flatten(-2)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return NVFP4Tensor(packed, scales.squeeze(-1).to(torch.float8_e4m3fn), global_scale)


def fake_quantize(x: Tensor, dtype: torch.dtype, per_row: bool = False) -> tuple[Tensor, Tensor]:
    """Return e2m1 * block_scale [..., D] in `dtype`, and global_scale [] or [..., 1], of x [..., D] (BF16, FP16, FP32).

    The values are exact in BF16 and FP32: the product of a 2-bit and a 4-bit significand has at most 6 bits and lies in
    [2^-10, 2688]. The hardware multiplies the same numbers, accumulates in FP32 and applies both global scales to the
    sum. Does not check finiteness: a NaN or infinity makes every value under its global scale NaN.
    """
    blocks = _blocks(x)
    scales, encode, global_scale = _scales(blocks, per_row)
    values = round_e2m1(_scale(blocks, encode)).mul_(scales)
    return values.flatten(-2).to(dtype), global_scale


def round_e2m1(x: Tensor) -> Tensor:
    """Round x, FP32 with |x| <= 6, to the nearest E2M1 value, ties to even, in place (a zero may lose its sign).

    An FP32 sum is rounded to the spacing of FP32 numbers at the sum. Adding 9 * 2^20 * h moves |x| in [0, 2) to where
    that spacing is 1/2 (h = 1/2), [2, 4) to where it is 1 (h = 3/2) and [4, 6] to where it is 2 (h = 5/2 or 7/2), which
    are the spacings of E2M1; a negative x moves to the negative side. Each shift is an even multiple of its spacing, so
    ties go to even. Exponent bits would need fewer steps, but torch.compile vectorises no integer views on the CPU.
    """
    h = (0.5 * x).floor_().add_(0.5)
    return x.add_(h, alpha=9 * 2**20).sub_(h, alpha=9 * 2**20)


def round_e4m3(x: Tensor) -> Tensor:
    """Return x, FP32 with |x| <= 448, rounded to the nearest E4M3 value; faster on a CPU than two casts.

    The power of two in x's exponent bits, at least 2^-6, the smallest normal number, gives E4M3's spacing q at x
    (3 fraction bits); x + 1.5 * 2^23 * q is rounded to a multiple of q, ties to even.
    """
    power = (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    shift = power.clamp_(min=2.0**-6).mul_(1.5 * 2.0**20)
    return (x + shift).sub_(shift)


def _blocks(x: Tensor) -> Tensor:
    return x.detach().unflatten(-1, (-1, BLOCK))


def _block_amax(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block [..., D/16, 16] as FP32 [..., D/16, 1].

    Floats without sign bits sort like the integers of the same bits, NaN last; eager mode reduces integers several
    times faster on the CPU.
    """
    if torch.compiler.is_compiling():
        return blocks.abs().amax(dim=-1, keepdim=True).float()
    integer = torch.int16 if blocks.itemsize == 2 else torch.int32
    magnitudes = blocks.view(integer) & torch.iinfo(integer).max
    return magnitudes.amax(dim=-1, keepdim=True).view(blocks.dtype).float()


def _scales(blocks: Tensor, per_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return E4M3 block scales in FP32 and factors to E2M1, both [..., D/16, 1], and global_scale."""
    block_amax = _block_amax(blocks)
    amax = block_amax.amax(dim=-2, keepdim=True) if per_row else block_amax.amax()
    # torch evaluates `number / tensor` as number * reciprocal, which rounds twice.
    encode = (torch.full_like(amax, E4M3_MAX * E2M1_MAX) / amax).clamp(max=_FLOAT32_MAX)
    decode = encode.reciprocal()
    scales = round_e4m3((block_amax * (encode * (1 / E2M1_MAX))).clamp_(max=E4M3_MAX))
    factors = (scales * decode).reciprocal_().clamp_(max=_FLOAT32_MAX)
    # Below amax = 2688 / FLT_MAX `encode` is clamped, and global_scale is the inverse of the clamped value.
    global_scale = (amax / (E4M3_MAX * E2M1_MAX)).clamp(min=1 / _FLOAT32_MAX)
    return scales, factors, global_scale.squeeze(-1)


def _scale(blocks: Tensor, factors: Tensor) -> Tensor:
    return (blocks * factors).clamp_(-E2M1_MAX, E2M1_MAX)


def _check(x: Tensor) -> None:
    if not x.is_floating_point() or x.ndim == 0 or x.numel() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"NVFP4 needs a floating-point tensor whose last dimension is a positive multiple of {BLOCK}; got "
            f"{x.dtype} {tuple(x.shape)}. Convert it, pad it with zeros, or leave it unquantised."
        )
    # torch.compile breaks the graph at a branch on data; compiled, a NaN or infinity makes every block scale NaN.
    if not torch.compiler.is_compiling() and not x.float().isfinite().all():
        count = int((~x.float().isfinite()).sum())
        raise ValueError(
            f"NVFP4 has no infinity and no NaN; got {count} non-finite values in FP32 in a tensor of shape "
            f"{tuple(x.shape)}. Find where they arise, or replace them (torch.nan_to_num) before quantising."
        )
