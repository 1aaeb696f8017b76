"""Copies of the transformer that share the policy's frozen weights.

Rollouts run on transformers without LoRA branches: the *merged* replica in BF16, the *shadow* quantised. A replica owns
the layers that LoRA adapts and those that are quantised; every other parameter is the policy's tensor.
"""

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from solrl_lightning.policies.base_weights import dense


def clone_sharing_weights(transformer: nn.Module) -> nn.Module:
    """A copy of the module tree whose parameters and buffers are the original's tensors."""
    tensors = chain(transformer.parameters(), transformer.buffers())
    return copy.deepcopy(transformer, {id(tensor): tensor for tensor in tensors})


def untie_weights(replica: nn.Module, names: Iterable[str]) -> None:
    """Copy the weights of the named linear layers, so that ``refresh`` may overwrite them."""
    for name in names:
        layer = replica.get_submodule(name)
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(dense(layer.weight).detach().clone(), requires_grad=False)


@torch.no_grad()
def refresh(replica: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Writes float32 ``weights`` into the replica's own layers, in place, so that compiled code stays valid."""
    for name, weight in weights:
        layer: Any = replica.get_submodule(name)
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(weight)  # rounds to the layer's dtype
        else:
            layer.requantize_(weight)
