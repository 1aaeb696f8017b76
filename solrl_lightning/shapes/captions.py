"""Training and held-out captions. They are disjoint; both have every colour, shape and relation."""

from functools import cache

import torch

from solrl_lightning.shapes.world import all_scenes

NUM_EVAL = 64
_SPLIT_SEED = 20260406


@cache  # dev/pretrain.py calls it for every batch
def _shuffled() -> tuple[str, ...]:
    captions = [scene.caption() for scene in all_scenes()]
    order = torch.randperm(len(captions), generator=torch.Generator().manual_seed(_SPLIT_SEED)).tolist()
    return tuple(captions[i] for i in order)


def eval_captions() -> list[str]:
    """The 64 held-out captions. Pretraining and post-training do not use them."""
    return list(_shuffled()[:NUM_EVAL])


def train_captions() -> list[str]:
    """The 1016 training captions."""
    return list(_shuffled()[NUM_EVAL:])
