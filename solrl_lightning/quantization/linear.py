"""What the linear layers of all backends have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

Layer = TypeVar("Layer", bound="QuantizedLinear")


class QuantizedLinear(nn.Module):
    """y = x W^T + b with W and x quantised: x [..., in] -> y [..., out] of the same dtype.

    Build it with `from_linear`; nothing in it is trained.
    """

    multiples: ClassVar[tuple[int, int]] = (1, 1)
    """Of which in_features and out_features must be multiples."""

    def __init__(self, in_features: int, out_features: int, bias: bool, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features, self.has_bias = in_features, out_features, bias

    @classmethod
    def obstacle(cls, linear: nn.Linear) -> str:
        """Why this layer cannot be quantised, or an empty string."""
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        for (name, size), multiple in zip(sizes.items(), cls.multiples, strict=True):
            if size % multiple:
                return f"{name} {size} is not a multiple of {multiple}"
        return ""

    @classmethod
    def from_linear(cls: type[Layer], linear: nn.Linear) -> Layer:
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, linear.weight.device)
        layer.refresh(linear.weight, linear.bias)
        return layer

    @abstractmethod
    def refresh(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Quantise another weight [out, in] into the same buffers, so that a compiled graph stays valid.

        A bias [out] replaces the old one; without it the old one stays.
        """

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}"
