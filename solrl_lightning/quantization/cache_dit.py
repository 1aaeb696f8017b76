"""INT4 linear layers by the SVDQuant kernels of cache-dit (compute capability 8.0 to 8.9), 4.25 bits per weight.

Not yet run on a GPU. ``make contract`` checks these calls against the source of cache-dit.

1. The kernels multiply two groups of 64 at a time, by 128 outputs. They add the sums of the groups in BF16, where the
   emulation adds them in FP32.
2. Their fused low-rank branch adds up x V^T by atomic operations, in another order each time, so a resumed run would
   rank otherwise. The branch of ``precision.low_rank`` is computed by ``low_rank``, as for every backend.
3. The kernel that quantises the input reads a factor for each column (``smooth``), so it gets ones.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.quantization.int4 import GROUP, encode_weight
from solrl_lightning.quantization.linear import BufferedLinear

INSTALL = "pip install cache-dit-cu13"


def is_installed() -> bool:
    """Return whether cache-dit is installed with its extension, which its wheel of Python files lacks."""
    spec = find_spec("cache_dit")
    return spec is not None and spec.origin is not None and any(Path(spec.origin).parent.glob("_C_svdquant*"))


@cache
def packer() -> Any:
    """Return what rearranges weights, scales and biases as the kernels read them."""
    from cache_dit.quantization.svdquant.packing import SVDQWeightPacker

    return SVDQWeightPacker(bits=4)


class CacheDiTLinear(BufferedLinear):
    """Linear layer with W and x in INT4, W packed, and y rounded to BF16.

    Raises:
        UserError: the extension does not load, because it was compiled against another torch.
    """

    feature_multiples = (2 * GROUP, 128)

    codes: Tensor  # int8 [out, in / 2], packed
    scales: Tensor  # bfloat16 [in / 64, out], packed

    def __init__(self, linear: nn.Linear) -> None:
        # Imported here and in `packer` because cache-dit is an optional dependency.
        from cache_dit.kernels import svdq_gemm_w4a4, svdq_get_load_error, svdq_quantize_w4a4_act_fuse_lora

        error = svdq_get_load_error()
        if error is not None:
            raise UserError(
                f"precision.backend=cache_dit is invalid: its extension must load with torch {torch.__version__}; it "
                f"does not ({error}). Use torch 2.11 or 2.12, compile cache-dit (docs/precision.md), or use "
                "precision.backend=emulated."
            )
        super().__init__(linear)
        self.quantize, self.product = svdq_quantize_w4a4_act_fuse_lora, svdq_gemm_w4a4

    def quantized_weight(self, weight: Tensor) -> dict[str, Tensor]:
        codes, scales = encode_weight(weight)
        return {
            "codes": packer().pack_weight(codes.flatten(1).to(torch.int32)),
            "scales": packer().pack_scale(scales.bfloat16().unsqueeze(1), group_size=GROUP),
        }

    def stored_bias(self, bias: Tensor) -> Tensor:
        return packer().pack_scale(bias.bfloat16().unsqueeze(1), group_size=-1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).bfloat16().contiguous()
        codes, scales, _ = self.quantize(rows, smooth=torch.ones_like(rows[0]))  # rows padded to a multiple of 256
        y = self.product(codes, self.codes, scales, self.scales, bias=self.bias, output_dtype=torch.bfloat16)
        return y[: len(rows)].to(x.dtype).unflatten(0, x.shape[:-1])
