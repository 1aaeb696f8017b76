"""Pictures and prompts for the tests of rewards."""

from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor

PROMPTS = ["a red circle above a blue square", "a photo of two cats", "an oil painting of a lighthouse at night"]


def drawn(height: int, width: int, seed: int) -> Image.Image:
    """A picture that is sensitive to resizing: gradients, fine texture, hard edges between black and white."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    pixels = torch.empty(3, height, width)
    for channel in pixels:
        waves, turn = torch.rand(2, generator=generator) * 12, torch.rand(2, generator=generator) * 6
        channel.copy_(0.5 + 0.25 * torch.sin(waves[0] * x + turn[0]) + 0.25 * torch.sin(waves[1] * y + turn[1]))
    pixels += 0.1 * torch.randn(3, height, width, generator=generator)
    left, top = (torch.rand(2, generator=generator) * 0.6).tolist()
    inside = (x > left) & (x < left + 0.3) & (y > top) & (y < top + 0.3)
    pixels = torch.where(inside, float(seed % 2), pixels).clamp(0, 1)
    return Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).numpy())


def as_tensor(picture: Image.Image) -> Tensor:
    """A picture as float32 [3, H, W] in [0, 1]."""
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return pixels.view(picture.height, picture.width, 3).permute(2, 0, 1) / 255


def all_pairs(reward: Callable[[Tensor, list[str]], Tensor], pictures: list[Image.Image]) -> Tensor:
    """Scores [B, U] of B pictures of one size for each of PROMPTS."""
    images = torch.stack([as_tensor(picture) for picture in pictures])
    columns = [reward(images, [prompt] * len(pictures)) for prompt in PROMPTS]
    return torch.stack(columns, dim=1)
