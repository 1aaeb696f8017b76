"""NVFP4 linear layers by Transformer Engine (compute capability 10.0 and newer), 4.5 bits per weight.

Not yet run on a GPU. ``make contract`` checks these calls against the source of Transformer Engine 2.9 and newer.

1. `quantized_model_init` without gradients stores row-wise NVFP4 only: no BF16 weight and no column-wise copy for the
   backward pass. Copying an FP32 tensor into the parameter quantises it in place, without rounding it to BF16 first.
2. The recipe turns off what is for training: 1 x 16 blocks for weights and inputs, no stochastic rounding, no Hadamard
   transform.
3. The input's global scale is a constant of the layer. Transformer Engine takes it from the largest magnitude of the
   input, so that a candidate depends on its batch, or of each row (``row_scaled_activation``), whose product
   writes FP32 and applies scales and bias in further passes. So the input is clamped to ``limit``, and one more row
   begins with it; the product writes BF16 with the bias. The limit comes from the first input after a requantisation,
   with headroom. It is 2688 times a power of two, so the global scale is a power of two, and another limit changes
   only values that are clamped, and blocks whose scale is below E4M3's normal numbers: 28672 times below the limit.
4. Rows are padded with zeros to a multiple of 32: NVFP4 needs multiples of 16, its fast kernel for BF16 of 32.
5. The layers run outside compiled graphs, which break around them: up to 2.19 ``te.Linear`` cannot be traced; 2.20
   traces it (PR #3053) with newer versions of PyTorch, not yet tried with quantised parameters.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from solrl_lightning.policies.base_weights import dense
from solrl_lightning.quantization.linear import QuantizedLinear
from solrl_lightning.quantization.nvfp4 import E2M1_MAX, E4M3_MAX

ROLLOUT_RECIPE = {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}
ROWS = 32
HEADROOM = 4.0
"""Least ratio of a layer's limit to the largest magnitude of its first input."""


def limit_above(amax: float) -> float:
    """Return the smallest 2688 * 2^k, exact in BF16, that is at least HEADROOM * amax, for amax > 0."""
    unit = E4M3_MAX * E2M1_MAX
    return unit * 2.0 ** math.ceil(math.log2(HEADROOM * amax / unit))


def with_limit(rows: Tensor, limit: float) -> Tensor:
    """Return rows [M, D] clamped to +-limit, then a row that begins with ``limit``, zeros up to a multiple of ROWS."""
    count = len(rows)
    padded = rows.new_empty(count + ROWS - count % ROWS, rows.shape[-1])
    torch.clamp(rows, -limit, limit, out=padded[:count])
    padded[count:] = 0
    padded[count, 0] = limit
    return padded


@cache
def rollout_recipe() -> Any:
    from transformer_engine.common.recipe import NVFP4BlockScaling

    return NVFP4BlockScaling(**ROLLOUT_RECIPE)


class TransformerEngineLinear(QuantizedLinear):
    """Linear layer with W and x in NVFP4, and y rounded to BF16."""

    feature_multiples = (16, 16)

    limit: float | None  # largest magnitude of an input; None before the first one

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
            self.set_bias_(linear.bias)

    @torch.no_grad()
    def requantize_(self, weight: Tensor) -> None:
        self.linear.weight.copy_(weight)  # quantises it
        self.limit = None

    @torch.no_grad()
    def set_bias_(self, bias: Tensor) -> None:
        self.linear.bias.copy_(bias)

    @torch.compiler.disable
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).bfloat16()
        if self.limit is None:
            amax = rows.abs().max().item()
            self.limit = limit_above(amax) if 0 < amax < math.inf else None
        with self._autocast(enabled=True, recipe=rollout_recipe()):
            y = self.linear(with_limit(rows, self.limit or E4M3_MAX * E2M1_MAX))
        return y[: len(rows)].to(x.dtype).unflatten(0, x.shape[:-1])
