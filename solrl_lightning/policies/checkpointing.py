"""Gradient checkpointing: recompute the activations of a block in the backward pass instead of keeping them."""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks_of(transformer: nn.Module) -> list[Any]:
    """Return the blocks of a diffusers model."""
    return [block for child in transformer.children() if isinstance(child, nn.ModuleList) for block in child]


def checkpoint_blocks(transformer: Any, blocks: bool | str, **options: Any) -> None:
    """Checkpoint all blocks of ``transformer`` (True, or ``auto``), every second one (``selective``), or none (False).

    ``options``: of ``torch.utils.checkpoint.checkpoint``.
    """
    transformer.disable_gradient_checkpointing()
    if not blocks:
        return
    for index, block in enumerate(blocks_of(transformer)):
        block.is_recomputed = blocks != "selective" or index % 2 == 0  # also in copies of the transformer
    recompute = partial(checkpoint, use_reentrant=False, **options)

    def run(block: Any, *args: Any) -> Any:
        return recompute(block, *args) if block.is_recomputed else block(*args)

    transformer.enable_gradient_checkpointing(run)
