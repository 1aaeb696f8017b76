"""Tensors of which each rank holds a part: DTensors along the first dimension, as FSDP2 makes them."""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

Tree = TypeVar("Tree")


def shard_like(value: Tensor, example: Tensor) -> Tensor:
    """Return this rank's part of ``value``, which all ranks have, if ``example`` is sharded; on its device."""
    if isinstance(value, DTensor) or not isinstance(example, DTensor):
        return value.to(example.device)
    return distribute_tensor(value, example.device_mesh, example.placements, src_data_rank=None)


def is_sharded(state: Mapping[str, Tensor]) -> bool:
    """Return whether ranks hold parts of the tensors."""
    return any(isinstance(value, DTensor) for value in state.values())


def gather(tree: Tree) -> Tree:
    """Return a tree with its sharded tensors whole: on the CPU of rank 0, and empty on the others. Collective."""

    def whole(tensor: DTensor) -> Tensor:
        value = tensor.full_tensor()
        return value.cpu() if distributed.get_rank() == 0 else value.new_empty(0)

    return tree_map_only(DTensor, whole, tree)
