"""Training and held-out captions: disjoint, and every colour, shape and relation occurs in both."""

from functools import cache

import torch

from solrl_lightning.shapes.world import all_scenes

NUM_EVAL = 64
_SPLIT_SEED = 20260406


@cache  # pretraining asks for every batch
def _shuffled() -> tuple[str, ...]:
    captions = [scene.caption() for scene in all_scenes()]
    order = torch.randperm(len(captions), generator=torch.Generator().manual_seed(_SPLIT_SEED)).tolist()
    return tuple(captions[i] for i in order)


def eval_captions() -> list[str]:
    """64 captions on which the model is evaluated; neither pretraining nor post-training sees them."""
    return list(_shuffled()[:NUM_EVAL])


def train_captions() -> list[str]:
    """The other 1016 captions."""
    return list(_shuffled()[NUM_EVAL:])
