"""GELU for compiled blocks on a CPU: its tanh form by the exponential function.

    0.5 x (1 + tanh(u)) = x sigmoid(2u),    u = sqrt(2 / pi) (x + 0.044715 x^3)

PyTorch's vectorised tanh takes some three times as long as its exponential function: a tenth of a compiled forward pass
of the embedded model. Eager code would make seven passes over the tensor, so it is used in compiled code only.
"""

import math

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def logistic_gelu(x: Tensor) -> Tensor:
    """``F.gelu(x, approximate="tanh")``, computed in float32 as that is and rounded once."""
    y = x.float()
    return (y * torch.sigmoid(y * (_LINEAR + _CUBIC * y * y))).to(x.dtype)


class LogisticGELU(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return logistic_gelu(x)


class LogisticGELUProjection(GELU):
    """diffusers' projection of a feed-forward network with its activation."""

    def gelu(self, gate: Tensor) -> Tensor:
        return logistic_gelu(gate)


def use_logistic_gelu(transformer: nn.Module) -> None:
    """Replaces the class of every GELU in tanh form, in place."""
    for module in transformer.modules():
        if type(module) is nn.GELU and module.approximate == "tanh":
            module.__class__ = LogisticGELU
        elif type(module) is GELU and module.approximate == "tanh":
            module.__class__ = LogisticGELUProjection
