"""Programmatic reward of the embedded world: agreement of a picture with its caption.

    reward = purity * (0.6 * (object_1 + object_2) / 2 + 0.4 * relation)        in [0, 1]

1. A softmax over squared RGB distances assigns every pixel to the background or to one of the six colours.
2. object_i is the product of three factors: the soft intersection over union of the mask of the caption's i-th colour
   with the named shape of the same centroid and area; (1 + softmax of that overlap among the three shapes) / 2, so a
   perfect square gets half the credit for a circle; and a smooth window on the area, 0 for no or a far too large area.
3. relation is a sigmoid of the distance from the second to the first centroid in the named direction, times both
   windows.
4. purity decays with the area of colours that the caption does not name.

Each step is smooth in the pixels, so the score ranks imperfect pictures.
"""

import torch
from torch import Tensor

from solrl_lightning.rewards.base import Reward
from solrl_lightning.shapes.world import (
    BACKGROUND,
    COLOURS,
    MAX_RADIUS,
    MIN_RADIUS,
    RELATIONS,
    SHAPES,
    coverage,
    parse_caption,
)

_COLOUR_VARIANCE = 0.02  # squared RGB distance at which a colour's share falls to 1/e
_OVERLAP_TEMPERATURE = 0.04  # circle and square of equal area overlap by 0.83, so their softmax ratio is e^4
_COLOUR_CREDIT = 0.5  # of an object with the right colour and the wrong shape
_RELATION_MARGIN, _RELATION_WIDTH = 4.0, 1.5  # pixels; rendered objects are at least 14 apart
_STRAY_FREE, _STRAY_SCALE = 12.0, 80.0  # pixels of other colours; antialiased edges have fewer than the first


class ShapesReward(Reward):
    """Scores images [B, 3, 32, 32] in [0, 1] by their shapes captions; the module docstring has the formula."""

    name = "shapes"

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self._palette = torch.tensor([*COLOURS.values(), BACKGROUND], device=self.device)  # [7, 3]

    def check_prompts(self, prompts: list[str]) -> None:
        """Raise ``UserError`` for a prompt that is no shapes caption."""
        for prompt in prompts:
            parse_caption(prompt)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Scores, float32 [B] in [0, 1]. Raises ``UserError`` for a prompt that is no shapes caption."""
        images = images.to(self.device, torch.float32)
        scenes = [parse_caption(prompt) for prompt in prompts]
        names = list(COLOURS)
        colour = torch.tensor([[names.index(s.first[0]), names.index(s.second[0])] for s in scenes], device=self.device)
        shape = torch.tensor(
            [[SHAPES.index(s.first[1]), SHAPES.index(s.second[1])] for s in scenes], device=self.device
        )
        direction = torch.tensor([RELATIONS[s.relation] for s in scenes], dtype=torch.float32, device=self.device)

        distance = (images[:, None] - self._palette[:, :, None, None]).square().sum(2)  # [B, 7, H, W]
        masks = torch.softmax(-distance / _COLOUR_VARIANCE, dim=1)[:, :-1]  # [B, 6, H, W] without the background
        size = images.shape[-1]
        mask = masks.gather(1, colour[..., None, None].expand(-1, -1, size, size)).flatten(0, 1)  # [2B, H, W]
        area = mask.sum((1, 2))
        axis = torch.arange(size, device=self.device) + 0.5
        centre = torch.stack([mask.sum(1) @ axis, mask.sum(2) @ axis], dim=1) / (area[:, None] + 1e-6)  # [2B, (x, y)]
        radius = (area / torch.pi).sqrt().clamp(0.5 * MIN_RADIUS, 1.5 * MAX_RADIUS)
        window = _rise(radius, 0.5 * MIN_RADIUS, MIN_RADIUS) * _rise(-radius, -1.5 * MAX_RADIUS, -1.1 * MAX_RADIUS)

        overlaps = []
        for index in range(len(SHAPES)):
            template = coverage(torch.full_like(area, index, dtype=torch.int64), centre, radius, size)
            overlaps.append(torch.minimum(mask, template).sum((1, 2)) / torch.maximum(mask, template).sum((1, 2)))
        overlap = torch.stack(overlaps, dim=1)  # [2B, 3]
        likelihood = torch.softmax(overlap / _OVERLAP_TEMPERATURE, dim=1)
        credit = overlap * (_COLOUR_CREDIT + (1 - _COLOUR_CREDIT) * likelihood)
        objects = window * credit.gather(1, shape.flatten()[:, None])[:, 0]

        pairs = centre.unflatten(0, (-1, 2))
        along = ((pairs[:, 0] - pairs[:, 1]) * direction).sum(1)
        relation = torch.sigmoid((along - _RELATION_MARGIN) / _RELATION_WIDTH) * window.unflatten(0, (-1, 2)).prod(1)
        stray = masks.sum((1, 2, 3)) - area.unflatten(0, (-1, 2)).sum(1)
        purity = torch.exp(-(stray - _STRAY_FREE).clamp(min=0) / _STRAY_SCALE)
        return purity * (0.6 * objects.unflatten(0, (-1, 2)).mean(1) + 0.4 * relation)


def _rise(x: Tensor, low: float, high: float) -> Tensor:
    """Smooth step, 3 u^2 - 2 u^3, from 0 at ``low`` to 1 at ``high``."""
    u = ((x - low) / (high - low)).clamp(0, 1)
    return u * u * (3 - 2 * u)
