"""GELU of compiled blocks on a CPU by the logistic function, which Inductor vectorises better than the tanh."""

import math

import torch
from diffusers.models import activations
from torch import Tensor, nn


class LogisticGELU(nn.GELU):
    """The tanh approximation of GELU as x * sigmoid(2 u), which is (1 + tanh(u)) / 2 * x and vectorises better."""

    def forward(self, x: Tensor) -> Tensor:
        return logistic_gelu(x)


class ProjectedLogisticGELU(activations.GELU):
    """As `LogisticGELU`, after a linear layer."""

    def gelu(self, gate: Tensor) -> Tensor:
        return logistic_gelu(gate)


def logistic_gelu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)


def use_logistic_gelu(transformer: nn.Module) -> None:
    """Replace the class of every tanh approximation of GELU in ``transformer``, in place."""
    for module in transformer.modules():
        if getattr(module, "approximate", None) == "tanh":
            if type(module) is nn.GELU:
                module.__class__ = LogisticGELU
            elif type(module) is activations.GELU:
                module.__class__ = ProjectedLogisticGELU
