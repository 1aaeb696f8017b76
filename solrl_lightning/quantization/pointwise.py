"""1x1 convolutions as the linear layers they are.

SANA's feed-forward network has two of them around a depthwise convolution. A 1x1 convolution of stride 1 without groups
multiplies the channels of each pixel by one matrix: a linear layer over channels-last tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer, or a convolution that is one."""
    if isinstance(module, nn.Conv2d):
        return (
            module.kernel_size == (1, 1)
            and module.stride == (1, 1)
            and module.padding in ((0, 0), "valid", "same")
            and module.groups == 1
        )
    return isinstance(module, nn.Linear)


def as_linear(module: nn.Module) -> nn.Linear:
    """The linear layer that ``module`` is. Of a convolution it shares the tensors."""
    if isinstance(module, nn.Linear):
        return module
    assert isinstance(module, nn.Conv2d) and is_linear(module)
    linear = nn.Linear(module.in_channels, module.out_channels, bias=module.bias is not None, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().flatten(1), requires_grad=False)
    if module.bias is not None:
        linear.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
    return linear


class Pointwise(nn.Module):
    """Runs a linear layer of a backend where a 1x1 convolution stood: [B, C, H, W] -> [B, C', H, W]."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear: Any = linear

    def forward(self, x: Tensor) -> Tensor:
        # Copies nothing where the network around it works on channels-last pixels, its tokens. Of a single image in the
        # other layout the tokens would be columns of a matrix, and a GPU's products take rows.
        return self.linear(x.movedim(1, -1).contiguous()).movedim(-1, 1)

    def refresh(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """As the layer's own, of a convolution's weight [C', C, 1, 1]."""
        self.linear.refresh(weight.flatten(1), bias)
