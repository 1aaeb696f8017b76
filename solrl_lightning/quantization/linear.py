"""Base class of the quantised linear layers of all backends, and 1x1 convolutions as linear layers.

SANA's feed-forward network has two such convolutions around a depthwise one.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from solrl_lightning.policies.base_weights import dense


class QuantizedLinear(nn.Module):
    """Computes y = x W^T + b with W and x quantised: x [..., in] -> y [..., out] of the same dtype.

    A subclass is built from an `nn.Linear`, and has no trainable parameters.
    """

    feature_multiples: ClassVar[tuple[int, int]] = (1, 1)
    """in_features and out_features must be multiples of these."""

    @classmethod
    def unsupported_reason(cls, linear: nn.Linear) -> str:
        """Return why ``linear`` cannot be quantised, or an empty string."""
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        for (name, size), multiple in zip(sizes.items(), cls.feature_multiples, strict=True):
            if size % multiple:
                return f"{name} {size} is not a multiple of {multiple}"
        return ""

    @abstractmethod
    def requantize_(self, weight: Tensor) -> None:
        """Quantise weight [out, in] in place, so that compiled graphs stay valid. The bias is unchanged."""

    @abstractmethod
    def set_bias_(self, bias: Tensor) -> None:
        """Write the bias [out] of a layer that has one, in place."""


class BufferedLinear(QuantizedLinear):
    """Linear layer that holds its quantised weight and its bias in buffers."""

    bias_dtype: ClassVar[torch.dtype] = torch.float32
    bias: Tensor | None  # [out]

    @torch.no_grad()
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        for name, value in self.quantized_weight(dense(linear.weight)).items():
            self.register_buffer(name, value)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.to(self.bias_dtype, copy=True))

    @abstractmethod
    def quantized_weight(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the buffers of a weight [out, in] by name."""

    @torch.no_grad()
    def requantize_(self, weight: Tensor) -> None:
        for name, value in self.quantized_weight(weight).items():
            self.get_buffer(name).copy_(value)

    @torch.no_grad()
    def set_bias_(self, bias: Tensor) -> None:
        self.get_buffer("bias").copy_(bias)


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

    def requantize_(self, weight: Tensor) -> None:
        """Quantise the convolution's weight [C', C, 1, 1] into the existing buffers."""
        self.linear.requantize_(weight.flatten(1))

    def set_bias_(self, bias: Tensor) -> None:
        """Write the bias [C'] in place."""
        self.linear.set_bias_(bias)
