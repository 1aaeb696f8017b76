"""Rewards: functions from images and prompts to one float32 score per image.

The rewards of the paper's experiments have their names here, too. Each is imported on first access, as a run imports
only the libraries that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solrl_lightning.rewards.clipscore import CLIPScore
    from solrl_lightning.rewards.hpsv2 import HPSv2
    from solrl_lightning.rewards.imagereward import ImageReward
    from solrl_lightning.rewards.pickscore import PickScore

__all__ = ["CLIPScore", "HPSv2", "ImageReward", "PickScore"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name.lower()}"), name)
