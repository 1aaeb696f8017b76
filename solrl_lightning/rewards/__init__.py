"""Rewards: images and prompts in, one float32 score per image out.

The classes that people name in scripts and configurations are found here, each imported when it is first asked for: a
run loads the libraries of its own rewards only.
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
