"""NVFP4 linear layers by Transformer Engine (compute capability 10.0 and newer), 4.5 bits per weight.

Not yet run on a GPU. ``make contract`` checks these calls against the source of Transformer Engine 2.9 and newer.

1. `quantized_model_init` without gradients stores row-wise NVFP4 only: no BF16 weight and no column-wise copy for the
   backward pass. Copying an FP32 tensor into the parameter quantises it in place, without rounding it to BF16 first.
2. The recipe sets every option, because the defaults are for training and depend on environment variables: 1 x 16
   blocks for weights and inputs, no stochastic rounding, no Hadamard transform, and from 2.16 on one global scale per
   row of the input. Before 2.16 all rows of a batch share one, so a candidate depends slightly on its batch.
3. Rows are padded with zeros to a multiple of 32: NVFP4 needs multiples of 16, its fast kernel for BF16 of 32.
4. The layers run outside compiled graphs, which break around them: up to 2.19 ``te.Linear`` cannot be traced; 2.20
   traces it (PR #3053) with newer versions of PyTorch, not yet tried with quantised parameters.
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

from solrl_lightning.policies.base_weights import dense
from solrl_lightning.quantization.linear import QuantizedLinear

ROLLOUT_RECIPE = {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}
ROW_SCALES_SINCE = (2, 16)
INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9'"
ROWS = 32


def is_installed() -> bool:
    """Return whether Transformer Engine is installed with its extension for PyTorch, without which its import fails.

    The extension is a file in the folder of the Python package or in its parent that ``find_spec`` does not find.
    """
    spec = find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return False
    beside = Path(spec.origin).parents[1]
    patterns = ("transformer_engine_torch*.so", "transformer_engine/**/transformer_engine_torch*.so")
    return any(any(beside.glob(pattern)) for pattern in patterns)


def has_row_scales() -> bool:
    """Return whether the installed version supports one global scale per row of the input."""
    major, minor = version("transformer_engine").split(".")[:2]
    return (int(major), int(minor)) >= ROW_SCALES_SINCE


@cache
def rollout_recipe() -> Any:
    from transformer_engine.common.recipe import NVFP4BlockScaling

    row_scales = {"row_scaled_activation": True} if has_row_scales() else {}
    return NVFP4BlockScaling(**ROLLOUT_RECIPE, **row_scales)


class TransformerEngineLinear(QuantizedLinear):
    """Linear layer with W and x in NVFP4, and y rounded to BF16."""

    feature_multiples = (16, 16)

    @torch.no_grad()
    def __init__(self, linear: nn.Linear) -> None:
        # Imported here because Transformer Engine is an optional dependency.
        import transformer_engine.pytorch as te

        super().__init__()
        with te.quantized_model_init(enabled=True, recipe=rollout_recipe()):
            self.linear = te.Linear(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                init_method=nn.init.zeros_,
                params_dtype=torch.bfloat16,
                device=linear.weight.device,
            )
        self.linear.requires_grad_(False)
        self._autocast = te.autocast
        self.requantize_(dense(linear.weight))
        if linear.bias is not None:
            self.linear.bias.copy_(linear.bias)

    @torch.no_grad()
    def requantize_(self, weight: Tensor) -> None:
        self.linear.weight.copy_(weight)  # quantises it

    @torch.compiler.disable
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).bfloat16()
        missing = -len(rows) % ROWS
        padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows.contiguous()  # F.pad always copies
        with self._autocast(enabled=True, recipe=rollout_recipe()):
            y = self.linear(padded)
        return y[: len(rows)].to(x.dtype).unflatten(0, x.shape[:-1])
