"""Frames of videos, for what scores, measures or shows pictures.

Shapes: B samples, F frames of a video, n of them.
"""

import torch
from torch import Tensor

FILMSTRIP = 4  # frames that stand for a video in a picture


def choose_frames(videos: Tensor, which: str | int) -> Tensor:
    """Return [B, n, 3, H, W] of videos [B, F, 3, H, W]: "first", "middle", "all", or n from the first to the last."""
    count = videos.shape[1]
    places = {"first": [0], "middle": [count // 2], "all": list(range(count))}
    return videos[:, places[which] if isinstance(which, str) else _spread(which, count)]


def filmstrip(images: Tensor) -> Tensor:
    """Return images [B, 3, H, W] as they are, and videos [B, F, 3, H, W] as [B, 3, H, n W]: n frames side by side."""
    if images.ndim == 4:
        return images
    shown = images[:, _spread(min(FILMSTRIP, images.shape[1]), images.shape[1])]
    return shown.permute(0, 2, 3, 1, 4).flatten(3)


def _spread(number: int, count: int) -> list[int]:
    """Return ``number`` of the numbers below ``count``, at equal distances up to rounding."""
    return torch.linspace(0, count - 1, number, dtype=torch.float64).round().long().tolist()
