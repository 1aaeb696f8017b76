"""Base class of the quantised linear layers of all backends."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

Layer = TypeVar("Layer", bound="QuantizedLinear")


class QuantizedLinear(nn.Module):
    """Computes y = x W^T + b with W and x quantised: x [..., in] -> y [..., out] of the same dtype.

    Build it with `from_linear`; it has buffers and no parameters to train.
    """

    feature_multiples: ClassVar[tuple[int, int]] = (1, 1)
    """in_features and out_features must be multiples of these."""

    def __init__(self, in_features: int, out_features: int, bias: bool, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features, self.has_bias = in_features, out_features, bias

    @classmethod
    def unsupported_reason(cls, linear: nn.Linear) -> str:
        """Return why ``linear`` cannot be quantised, or an empty string."""
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        for (name, size), multiple in zip(sizes.items(), cls.feature_multiples, strict=True):
            if size % multiple:
                return f"{name} {size} is not a multiple of {multiple}"
        return ""

    @classmethod
    def from_linear(cls: type[Layer], linear: nn.Linear) -> Layer:
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, linear.weight.device)
        layer.requantize_(linear.weight, linear.bias)
        return layer

    @abstractmethod
    def requantize_(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Quantise weight [out, in] into the existing buffers, so that compiled graphs stay valid.

        A bias [out] overwrites the current one; None keeps it.
        """

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}"
