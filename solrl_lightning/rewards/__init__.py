"""Rewards: functions from images and prompts to one float32 score per image.

This package imports a reward's module on first access to its class, so a run imports only the libraries that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solrl_lightning.rewards.aesthetic import Aesthetic
    from solrl_lightning.rewards.clipscore import CLIPScore
    from solrl_lightning.rewards.geneval import GenEval
    from solrl_lightning.rewards.hpsv2 import HPSv2
    from solrl_lightning.rewards.hpsv3 import HPSv3
    from solrl_lightning.rewards.imagereward import ImageReward
    from solrl_lightning.rewards.ocr import OCR
    from solrl_lightning.rewards.pickscore import PickScore

__all__ = ["OCR", "Aesthetic", "CLIPScore", "GenEval", "HPSv2", "HPSv3", "ImageReward", "PickScore"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name.lower()}"), name)
