"""Images as the towers of CLIP models want them: on tensors, in batches, on the images' device.

Two ways, as published:

1. ``CropToSquare``: CLIP's own; the shortest side to the model's size, the middle square of that.
2. ``pad_to_square``: HPSv2's; the longest side to the model's size, zeros around that.

Both start from images rounded to 8 bits, so that an image scores as the PNG file does that it is saved to. PIL, the
reference of the first, resizes columns, then rows, and rounds to 8 bits after each; scores without those roundings are
ten times and more further from it. The reference of the second resizes floats.

Shapes: B images of H x W pixels, S the model's side.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def eight_bits(images: Tensor) -> Tensor:
    """float32 of images, clipped to [0, 1] and rounded to multiples of 1/255."""
    return (images.float().clamp(0, 1) * 255).round() / 255


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """float32 [B, 3, height, width] of images [B, 3, H, W]: antialiased bicubic, the kernel that PIL has, too."""
    return F.interpolate(images, (height, width), mode="bicubic", antialias=True, align_corners=False)


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(images - mean) / std per channel of images [B, 3, H, W]."""
    centre, scale = (torch.tensor(values, device=images.device)[:, None, None] for values in (mean, std))
    return (images - centre) / scale


class CropToSquare(NamedTuple):
    """The parameters of a CLIP image processor."""

    shortest: int  # pixels of the shorter side after resizing
    height: int  # of the crop, pixels
    width: int
    mean: tuple[float, ...]  # per channel, of images in [0, 1]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """float32 [B, 3, height, width] of images [B, 3, H, W] in [0, 1], normalised."""
        old_high, old_wide = images.shape[-2:]
        short = min(old_high, old_wide)
        # The longer side is rounded down, as transformers and torchvision do.
        high, wide = self.shortest * old_high // short, self.shortest * old_wide // short
        columns = eight_bits(resize(eight_bits(images), old_high, wide))
        resized = eight_bits(resize(columns, high, wide))
        top, left = (high - self.height) // 2, (wide - self.width) // 2
        return normalize(resized[..., top : top + self.height, left : left + self.width], self.mean, self.std)


def pad_to_square(images: Tensor, side: int) -> Tensor:
    """float32 [B, 3, S, S] of images [B, 3, H, W] in [0, 1]: the longest side is S, the rest black and centred.

    Black before normalisation; the published preprocessing pads then, too.
    """
    scale = side / max(images.shape[-2:])
    high, wide = (max(1, round(pixels * scale)) for pixels in images.shape[-2:])  # the thinnest strip is one pixel
    down, right = side - high, side - wide
    padding = (right // 2, right - right // 2, down // 2, down - down // 2)
    return F.pad(resize(eight_bits(images), high, wide), padding)
