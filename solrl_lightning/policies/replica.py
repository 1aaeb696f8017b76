"""Copies of the transformer that share the policy's frozen weights.

Rollouts run on transformers without LoRA branches: the *merged* replica in BF16, the *shadow* quantised. A replica owns
the layers that LoRA adapts and those that are quantised; every other parameter is the policy's tensor. With
model.train=full nothing is frozen, and a replica owns all of its parameters.
"""

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from solrl_lightning.policies.base_weights import dense


def clone_sharing_weights(transformer: nn.Module) -> nn.Module:
    """Return a copy of the module tree whose parameters and buffers are the original's tensors."""
    tensors = chain(transformer.parameters(), transformer.buffers())
    return copy.deepcopy(transformer, {id(tensor): tensor for tensor in tensors})


def untie_parameters(replica: nn.Module, names: Iterable[str]) -> None:
    """Copy the named parameters, except in quantised layers, so that ``write_parameters`` may overwrite them."""
    for path in names:
        layer, name = _owner(replica, path)
        if name in layer._parameters:
            setattr(layer, name, nn.Parameter(dense(layer._parameters[name]).detach().clone(), requires_grad=False))


@torch.no_grad()
def write_parameters(replica: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Write named parameters into the replica in place, so that compiled code stays valid.

    Quantised layers quantise the weight.
    """
    for path, value in parameters:
        layer, name = _owner(replica, path)
        if name in layer._parameters:
            layer._parameters[name].copy_(value)  # rounds to the parameter's dtype
        elif name == "weight":
            layer.requantize_(value.float())
        else:
            layer.set_bias_(value)


def _owner(replica: nn.Module, path: str) -> tuple[Any, str]:
    """Return the layer of a parameter, and its name there."""
    layer, _, name = path.rpartition(".")
    return replica.get_submodule(layer), name
