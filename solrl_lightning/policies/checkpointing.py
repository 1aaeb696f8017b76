"""Gradient checkpointing: recompute the activations of a block in the backward pass instead of keeping them."""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(transformer: Any, blocks: bool | str, **options: Any) -> None:
    """Checkpoint all blocks of ``transformer`` (True), every second one (``selective``), or none (False).

    Args:
        transformer: a diffusers model.
        options: of ``torch.utils.checkpoint.checkpoint``.
    """
    transformer.disable_gradient_checkpointing()
    if not blocks:
        return
    lists = [child for child in transformer.children() if isinstance(child, nn.ModuleList)]
    all_blocks: list[Any] = [block for blocks_of_a_kind in lists for block in blocks_of_a_kind]
    for index, block in enumerate(all_blocks):
        block.is_recomputed = blocks != "selective" or index % 2 == 0  # also in copies of the transformer
    recompute = partial(checkpoint, use_reentrant=False, **options)

    def run(block: Any, *args: Any) -> Any:
        return recompute(block, *args) if block.is_recomputed else block(*args)

    transformer.enable_gradient_checkpointing(run)
