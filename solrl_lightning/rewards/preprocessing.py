"""Preprocesses batches of image tensors for CLIP models, on the images' device.

1. ``CropToSquare``, CLIP's preprocessing: resizes the shortest side to the model's size and crops the middle square.
2. ``pad_to_square``, HPSv2's preprocessing: resizes the longest side to the model's size and pads with zeros.

Both round images to 8 bits first, so an image and the PNG file saved from it have the same score. PIL, the reference of
the first, resizes the width, then the height, and rounds to 8 bits after each; without those roundings the distance
from the reference is at least ten times as large. The reference of the second resizes floats.

Shapes: B images of H x W pixels, S the model's side.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.functional import normalize


def eight_bits(images: Tensor) -> Tensor:
    """Return images in float32, clipped to [0, 1] and rounded to multiples of 1/255."""
    return (images.float().clamp(0, 1) * 255).round() / 255


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Return images [B, 3, H, W] resized to float32 [B, 3, height, width]: antialiased bicubic, PIL's kernel."""
    return F.interpolate(images, (height, width), mode="bicubic", antialias=True, align_corners=False)


class CropToSquare(NamedTuple):
    """The parameters of a CLIP image processor."""

    shortest: int  # pixels of the shorter side after resizing
    height: int  # of the crop, pixels
    width: int
    mean: list[float]  # per channel, of images in [0, 1]
    std: list[float]

    def __call__(self, images: Tensor) -> Tensor:
        """Return images [B, 3, H, W] in [0, 1] resized, cropped and normalised to float32 [B, 3, height, width]."""
        old_high, old_wide = images.shape[-2:]
        short = min(old_high, old_wide)
        # transformers and torchvision round the longer side down.
        high, wide = self.shortest * old_high // short, self.shortest * old_wide // short
        columns = eight_bits(resize(eight_bits(images), old_high, wide))
        resized = eight_bits(resize(columns, high, wide))
        top, left = (high - self.height) // 2, (wide - self.width) // 2
        return normalize(resized[..., top : top + self.height, left : left + self.width], self.mean, self.std)


def pad_to_square(images: Tensor, side: int) -> Tensor:
    """Return images [B, 3, H, W] in [0, 1] resized and padded to float32 [B, 3, S, S].

    The longest side becomes S, and black fills the rest on both sides. Normalisation comes after padding, as published.
    """
    scale = side / max(images.shape[-2:])
    high, wide = (max(1, round(pixels * scale)) for pixels in images.shape[-2:])  # the thinnest strip is one pixel
    down, right = side - high, side - wide
    padding = (right // 2, right - right // 2, down // 2, down - down // 2)
    return F.pad(resize(eight_bits(images), high, wide), padding)
