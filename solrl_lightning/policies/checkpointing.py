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
    all_blocks = [block for blocks_of_a_kind in lists for block in blocks_of_a_kind]
    recomputed = set(all_blocks[::2] if blocks == "selective" else all_blocks)
    recompute = partial(checkpoint, use_reentrant=False, **options)

    def run(block: nn.Module, *args: Any) -> Any:
        return recompute(block, *args) if block in recomputed else block(*args)

    transformer.enable_gradient_checkpointing(run)
