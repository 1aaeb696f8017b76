"""NVFP4 linear layers by Transformer Engine (compute capability 10.0 and newer), packed in 4.5 bits.

Not yet run on a GPU. ``make contract`` holds these calls against Transformer Engine's source, from 2.9 on.
What a rollout needs of it:

1. `quantized_model_init` without gradients: the layer holds row-wise NVFP4 and neither the BF16 weight nor the
   column-wise copy of the backward pass. Copying an FP32 tensor into the parameter quantises it in place, without
   rounding it to BF16, once per refresh and not per forward.
2. A recipe of its own: the defaults are for training. 1 x 16 blocks for weights as for inputs (16 x 16 blocks make W
   and its transpose agree), no stochastic rounding and no Hadamard transform (both are for gradients), and from 2.16 on
   a global scale for each row of the input. Said outright, because the defaults come from environment variables.
3. Rows in multiples of 32: NVFP4 needs multiples of 16, and its fast kernel for BF16 multiples of 32. Rows of zeros
   change no other row.

Before 2.16 all rows of a batch share one global scale, so a candidate's numbers depend a little on the others of its
batch, as those of no other backend do.

Transformer Engine's layers run outside compiled graphs: what is around them is compiled, in pieces. Up to 2.19 its
``Linear`` refuses to be traced. 2.20 traces it (its PR #3053) where PyTorch has the experimental types of which its
quantisers are, and breaks the graph elsewhere; what happens to quantised parameters is not tried yet.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solrl_lightning.quantization.linear import QuantizedLinear

ROLLOUT_RECIPE = {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}
ROW_SCALES_SINCE = (2, 16)
INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9'"
ROWS = 32


def is_installed() -> bool:
    """Whether Transformer Engine is there with its extension for PyTorch, without which its import fails.

    The extension is a file beside the Python package or in one of its folders, not a module that ``find_spec`` finds.
    """
    spec = find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return False
    beside = Path(spec.origin).parents[1]
    patterns = ("transformer_engine_torch*.so", "transformer_engine/**/transformer_engine_torch*.so")
    return any(any(beside.glob(pattern)) for pattern in patterns)


def has_row_scales() -> bool:
    """Whether the installed version can give each row of the input a global scale of its own."""
    major, minor = version("transformer_engine").split(".")[:2]
    return (int(major), int(minor)) >= ROW_SCALES_SINCE


@cache
def rollout_recipe() -> Any:
    from transformer_engine.common.recipe import NVFP4BlockScaling

    row_scales = {"row_scaled_activation": True} if has_row_scales() else {}
    return NVFP4BlockScaling(**ROLLOUT_RECIPE, **row_scales)


class TransformerEngineLinear(QuantizedLinear):
    """With W and x in NVFP4, and y rounded to BF16."""

    multiples = (16, 16)

    def __init__(self, in_features: int, out_features: int, bias: bool, device: torch.device) -> None:
        # Imported here: it is there only on the hardware that it is for.
        import transformer_engine.pytorch as te

        super().__init__(in_features, out_features, bias, device)
        with torch.no_grad(), te.quantized_model_init(enabled=True, recipe=rollout_recipe()):
            self.linear = te.Linear(
                in_features,
                out_features,
                bias=bias,
                init_method=nn.init.zeros_,
                params_dtype=torch.bfloat16,
                device=device,
            )
        self.linear.requires_grad_(False)
        self._autocast = te.autocast

    @torch.no_grad()
    def refresh(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.linear.weight.copy_(weight)  # which quantises it
        if self.linear.use_bias and bias is not None:
            self.linear.bias.copy_(bias)

    @torch.compiler.disable
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).bfloat16()
        missing = -len(rows) % ROWS
        padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows.contiguous()  # F.pad copies even if by nothing
        with self._autocast(enabled=True, recipe=rollout_recipe()):
            y = self.linear(padded)
        return y[: len(rows)].to(x.dtype).unflatten(0, x.shape[:-1])
