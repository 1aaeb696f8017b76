"""Pictures, prompts and shipped configurations for the tests of rewards."""

from collections.abc import Callable
from typing import Any

import torch
import torchvision.transforms.functional as vision
from hydra.utils import instantiate
from PIL import Image
from torch import Tensor, nn

from solrl_lightning.cli.config import ConfigTree

PROMPTS = ["a red circle above a blue square", "a photo of two cats", "an oil painting of a lighthouse at night"]
FOUR = [*PROMPTS, "a fourth prompt"]  # for the fixture ``images``
LONG = " ".join([PROMPTS[0]] * 20)  # far more than 77 tokens


def shipped(name: str, **local: Any) -> Any:
    """The reward of conf/reward/``name``.yaml with local files."""
    with ConfigTree() as tree:
        arguments = dict(tree.compose([f"reward={name}"]).reward[name])
    assert arguments.pop("weight") == 1
    return instantiate(arguments | local, device="cpu")


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
    return vision.pil_to_tensor(picture) / 255


def as_picture(image: Tensor) -> Image.Image:
    """An image [3, H, W] in [0, 1] with 8 bits."""
    return vision.to_pil_image((image.float() * 255).round().byte())


def padded(picture: Image.Image, side: int = 224) -> Tensor:
    """HPSv2's published transform: converts to a float tensor, resizes its longest side, pads with zeros."""
    image = vision.to_tensor(picture)
    scale = side / float(max(image.shape[1:]))
    high, wide = (round(pixels * scale) for pixels in image.shape[1:])
    image = vision.resize(image, [high, wide], vision.InterpolationMode.BICUBIC, antialias=True)
    down, right = side - high, side - wide
    return vision.pad(image, [right // 2, down // 2, right - right // 2, down - down // 2], fill=0)


def all_pairs(reward: Callable[[Tensor, list[str]], Tensor], pictures: list[Image.Image]) -> Tensor:
    """Scores [B, U] of B pictures of one size for each of PROMPTS."""
    images = torch.stack([as_tensor(picture) for picture in pictures])
    columns = [reward(images, [prompt] * len(pictures)) for prompt in PROMPTS]
    return torch.stack(columns, dim=1)


def spread_out(model: nn.Module, seed: int) -> None:
    """Replace the weights by large random ones, so that scores differ clearly between images and texts."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name == "logit_scale":
            nn.init.constant_(parameter, 4.6052)  # ln 100, the most that CLIP's training allows
        elif parameter.ndim > 1 or name.endswith("class_embedding"):
            nn.init.normal_(parameter, std=1.5 * parameter[0].numel() ** -0.5, generator=generator)
