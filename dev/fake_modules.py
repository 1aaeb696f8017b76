"""Moves modules of fake tensors, for dev/absent_gpu.py and the tests."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def apply_to_fakes(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace nn.Module._apply, which swaps parameters in a way that fake tensors do not support."""
    for child in module.children():
        apply_to_fakes(child, function)
    for name, parameter in module.named_parameters(recurse=False):
        with torch.no_grad():
            other = function(parameter)
        if other is not parameter:
            setattr(module, name, nn.Parameter(other, parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, function(buffer))
    return module
