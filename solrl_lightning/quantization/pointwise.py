"""Pointwise (1x1) convolutions as linear layers over channels-last tokens.

SANA's feed-forward network has two of them around a depthwise convolution.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_linear(module: nn.Module) -> bool:
    """Return whether ``module`` is a linear layer or a 1x1 convolution of stride 1 without groups."""
    if isinstance(module, nn.Conv2d):
        return (
            module.kernel_size == (1, 1)
            and module.stride == (1, 1)
            and module.padding in ((0, 0), "valid", "same")
            and module.groups == 1
        )
    return isinstance(module, nn.Linear)


def as_linear(module: nn.Module) -> nn.Linear:
    """Return ``module`` as a linear layer; one made from a convolution shares its tensors."""
    if isinstance(module, nn.Linear):
        return module
    assert isinstance(module, nn.Conv2d) and is_linear(module)
    linear = nn.Linear(module.in_channels, module.out_channels, bias=module.bias is not None, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().flatten(1), requires_grad=False)
    if module.bias is not None:
        linear.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
    return linear


class Conv1x1AsLinear(nn.Module):
    """Runs a 1x1 convolution by a linear layer of a backend: [B, C, H, W] -> [B, C', H, W]."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear: Any = linear

    def forward(self, x: Tensor) -> Tensor:
        # contiguous() copies only where x is not channels-last; the GPU products require tokens as rows.
        return self.linear(x.movedim(1, -1).contiguous()).movedim(-1, 1)

    def requantize_(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Quantise the convolution's weight [C', C, 1, 1] into the existing buffers."""
        self.linear.requantize_(weight.flatten(1), bias)
