"""The INT4 format (W4A4) of SVDQuant's kernels as functions of tensors: groups of 64 along the last dimension.

A value is  code * scale:  an integer from -7 to 7, and one BF16 scale for each group. Everything is rounded to nearest,
ties to even.

    weight:  scale = bf16(amax / 7)      code = round(w / scale)
    input:   scale = amax * (1/7)        code = round(x * (1 / scale)), then bf16(scale)

By the source of cache-dit 1.5.3 (``quantizer._compute_group_scales``, ``gemm_w4a4.cuh``, after Nunchaku), whose GPU
code for 1 / scale may differ in the last bit. Values have 11 significant bits: exact in FP32 and in TF32, not in BF16.
"""

import torch
from torch import Tensor

GROUP = 64
INT4_MAX = 7.0  # symmetric: -8 is not used
_SMALLEST_AMAX = 1e-12  # a group of zeros gives zeros


def encode_weight(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [..., D/64, 64] and scales [..., D/64, 1], numbers of BF16, of a weight x [..., D]; both in FP32."""
    groups, amax = _groups(x)
    scale = (amax / torch.full_like(amax, INT4_MAX)).bfloat16().float()
    return (groups / scale).round_(), scale


def encode_input(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of an input x as `encode_weight` does of a weight."""
    groups, amax = _groups(x)
    scale = amax * (1 / INT4_MAX)
    return (groups * scale.reciprocal()).round_(), scale.bfloat16().float()


def quantize_weight(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return code * scale [..., D] of a weight x [..., D] in `dtype`, which must represent them, and ones [..., 1]."""
    return _values(*encode_weight(x), dtype)


def quantize_input(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return code * scale and ones of an input x as `quantize_weight` does of a weight."""
    return _values(*encode_input(x), dtype)


def _groups(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.detach().float().unflatten(-1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    return groups, torch.maximum(high, -low).clamp(min=_SMALLEST_AMAX)


def _values(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (codes * scale).flatten(-2).to(dtype), torch.ones_like(codes[..., 0, :1])
