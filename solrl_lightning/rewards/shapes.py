"""Programmatic reward of the embedded world: agreement of a picture with its caption.

    reward = purity * (0.6 * (object_1 + object_2) / 2 + 0.4 * relation)        in [0, 1]

1. A softmax over squared RGB distances assigns every pixel to the background, to one of the six colours, or to the edge
   of one, midway between it and the background (a blue edge looks purple). An edge counts half.
2. object_i is the product of three factors: the soft intersection over union of the mask of the caption's i-th colour
   with the mask that a rendering of the named shape with the same centroid and area has; (1 + softmax of that overlap
   among the three shapes) / 2, so a perfect square gets half the credit for a circle; and a smooth window on the area,
   0 for no or a far too large area.
3. relation is a sigmoid of the distance from the second to the first centroid in the named direction, times both
   windows.
4. purity decays with the area of colours that the caption does not name.

Each step is smooth in the pixels, so the score ranks imperfect pictures. ``ShapesStrict`` is 1 for a picture that is
right altogether, else 0.
"""

from typing import NamedTuple

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
_OVERLAP_TEMPERATURE = 0.04  # masks of a circle and a square of equal area overlap by 0.83: their softmax ratio is e^4
_COLOUR_CREDIT = 0.5  # of an object with the right colour and the wrong shape
_RELATION_MARGIN, _RELATION_WIDTH = 4.0, 1.5  # pixels; rendered objects are at least 14 apart
_STRAY_FREE, _STRAY_SCALE = 12.0, 80.0  # pixels of other colours; antialiased edges have fewer than the first
_STRAY_STRICT = 20.0  # pixels of other colours in a picture without other objects; the smallest object has 45


class Measured(NamedTuple):
    """Properties of B images with two named objects each."""

    objects: Tensor
    """[B, 2]: how well each object agrees with its shape and size, in [0, 1]."""
    named: Tensor
    """bool [B, 2]: the object overlaps most with the named shape."""
    present: Tensor
    """[B, 2]: the window on each object's area, in [0, 1]."""
    along: Tensor
    """[B]: pixels from the second to the first centroid in the named direction."""
    stray: Tensor
    """[B]: pixels of other colours."""


class ShapesReward(Reward):
    """Scores images [B, 3, 32, 32] in [0, 1] by their shapes captions; the module docstring has the formula."""

    name = "shapes"
    part_names: tuple[str, ...] = ("objects", "relation", "purity", "right_shape", "right_side", "all_right")

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        colours, background = torch.tensor(list(COLOURS.values())), torch.tensor([BACKGROUND])
        edges = (colours + background) / 2
        self._palette = torch.cat([colours, edges, background]).to(self.device)  # [13, 3]
        self._squares = self._palette.square().sum(1)[:, None, None]
        self._contrast = (colours - background).square().sum(1).to(self.device) / _COLOUR_VARIANCE  # [6]

    def check_prompts(self, prompts: list[str]) -> None:
        """Raise ``UserError`` for a prompt that is no shapes caption."""
        for prompt in prompts:
            parse_caption(prompt)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Return scores, float32 [B] in [0, 1]. Raises ``UserError`` for a prompt that is no shapes caption."""
        objects, relation, purity = _terms(self._measure(images, prompts))
        return purity * (0.6 * objects + 0.4 * relation)

    def parts(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Return the terms of the score, the share of right shapes, and whether the side, and all, is right."""
        measured = self._measure(images, prompts)
        shapes, side = measured.named.float().mean(1), (measured.along > _RELATION_MARGIN).float()
        return torch.stack([*_terms(measured), shapes, side, _all_right(measured)], dim=1)

    def _measure(self, images: Tensor, prompts: list[str]) -> Measured:
        images = images.to(self.device, torch.float32)
        scenes = [parse_caption(prompt) for prompt in prompts]
        names = list(COLOURS)
        colour = torch.tensor([[names.index(s.first[0]), names.index(s.second[0])] for s in scenes], device=self.device)
        shape = torch.tensor(
            [[SHAPES.index(s.first[1]), SHAPES.index(s.second[1])] for s in scenes], device=self.device
        )
        direction = torch.tensor([RELATIONS[s.relation] for s in scenes], dtype=torch.float32, device=self.device)

        # |x - c|^2 without |x|^2, which the softmax does not see.
        products = (images[:, i, None] * self._palette[:, i, None, None] for i in range(3))
        closeness = 2 * sum(products) - self._squares  # [B, 13, H, W]
        solid, edges, _ = torch.softmax(closeness / _COLOUR_VARIANCE, dim=1).split([len(names), len(names), 1], dim=1)
        masks = solid + edges / 2  # [B, 6, H, W]
        size = images.shape[-1]
        mask = masks.gather(1, colour[..., None, None].expand(-1, -1, size, size)).flatten(0, 1)  # [2B, H, W]
        area = mask.sum((1, 2))
        axis = torch.arange(size, device=self.device) + 0.5
        centre = torch.stack([mask.sum(1) @ axis, mask.sum(2) @ axis], dim=1) / (area[:, None] + 1e-6)  # [2B, (x, y)]
        radius = (area / torch.pi).sqrt().clamp(0.5 * MIN_RADIUS, 1.5 * MAX_RADIUS)
        window = _rise(radius, 0.5 * MIN_RADIUS, MIN_RADIUS) * _rise(-radius, -1.5 * MAX_RADIUS, -1.1 * MAX_RADIUS)

        contrast = self._contrast[colour.flatten()][:, None, None]
        overlaps = []
        for index in range(len(SHAPES)):
            covered = coverage(torch.full_like(area, index, dtype=torch.int64), centre, radius, size)
            template = _mask_of(covered, contrast)
            overlaps.append(torch.minimum(mask, template).sum((1, 2)) / torch.maximum(mask, template).sum((1, 2)))
        overlap = torch.stack(overlaps, dim=1)  # [2B, 3]
        likelihood = torch.softmax(overlap / _OVERLAP_TEMPERATURE, dim=1)
        credit = overlap * (_COLOUR_CREDIT + (1 - _COLOUR_CREDIT) * likelihood)
        objects = window * credit.gather(1, shape.flatten()[:, None])[:, 0]

        pairs = centre.unflatten(0, (-1, 2))
        along = ((pairs[:, 0] - pairs[:, 1]) * direction).sum(1)
        stray = masks.sum((1, 2, 3)) - area.unflatten(0, (-1, 2)).sum(1)
        objects, window, area = (value.unflatten(0, (-1, 2)) for value in (objects, window, area))
        return Measured(objects, overlap.argmax(1).unflatten(0, (-1, 2)) == shape, window, along, stray)


class ShapesStrict(ShapesReward):
    """Scores 1 for an image with both objects, both shapes, the right side and nothing else, otherwise 0."""

    name = "shapes_strict"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return _all_right(self._measure(images, prompts))


def _mask_of(covered: Tensor, contrast: Tensor) -> Tensor:
    """Return the mask of pixels that an object covers by ``covered``: the softmax over background, edge and object."""
    background, edge, solid = (torch.exp(-(covered - share).square() * contrast) for share in (0.0, 0.5, 1.0))
    return (solid + edge / 2) / (background + edge + solid)


def _terms(measured: Measured) -> tuple[Tensor, Tensor, Tensor]:
    """Return objects, relation and purity, each [B] in [0, 1]."""
    relation = torch.sigmoid((measured.along - _RELATION_MARGIN) / _RELATION_WIDTH) * measured.present.prod(1)
    purity = torch.exp(-(measured.stray - _STRAY_FREE).clamp(min=0) / _STRAY_SCALE)
    return measured.objects.mean(1), relation, purity


def _all_right(measured: Measured) -> Tensor:
    objects = measured.named.all(1) & (measured.present.prod(1) > 0.5)
    return (objects & (measured.along > _RELATION_MARGIN) & (measured.stray < _STRAY_STRICT)).float()


def _rise(x: Tensor, low: float, high: float) -> Tensor:
    """Return the smooth step, 3 u^2 - 2 u^3, from 0 at ``low`` to 1 at ``high``."""
    u = ((x - low) / (high - low)).clamp(0, 1)
    return u * u * (3 - 2 * u)
