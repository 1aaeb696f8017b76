"""Scenes of two coloured shapes: the caption grammar, the split of the captions, and the shapes' geometry.

A caption is ``a <colour> <shape> <relation> a <colour> <shape>``, for example "a red circle above a blue square". The
two colours differ, so a pixel's colour identifies its object. Lengths are in pixels of a 32 x 32 image. The origin is
the upper left corner, and y increases downwards.
"""

import re
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.errors import UserError

IMAGE_SIZE = 32
NUM_EVAL = 64
_SPLIT_SEED = 20260406
BACKGROUND = (0.95, 0.95, 0.93)
COLOURS = {
    "red": (0.90, 0.15, 0.15),
    "green": (0.15, 0.65, 0.20),
    "blue": (0.15, 0.25, 0.90),
    "yellow": (0.95, 0.80, 0.10),
    "purple": (0.60, 0.15, 0.75),
    "cyan": (0.10, 0.80, 0.85),
}
SHAPES = ("circle", "square", "triangle")
RELATIONS = {  # name -> direction (x, y) from the second object to the first
    "above": (0, -1),
    "below": (0, 1),
    "left of": (-1, 0),
    "right of": (1, 0),
}
MIN_RADIUS, MAX_RADIUS = 3.8, 5.6  # of the disc of equal area
_CAPTION = re.compile(
    r"an? (?P<c1>{c}) (?P<s1>{s}) (?P<rel>{r}) an? (?P<c2>{c}) (?P<s2>{s})".format(
        c="|".join(COLOURS), s="|".join(SHAPES), r="|".join(RELATIONS)
    )
)


class Scene(NamedTuple):
    """The content of a caption: two (colour, shape) objects and the relation of the first to the second."""

    first: tuple[str, str]
    relation: str
    second: tuple[str, str]

    def caption(self) -> str:
        return f"a {' '.join(self.first)} {self.relation} a {' '.join(self.second)}"


def parse_caption(caption: str) -> Scene:
    """Parse a caption into its scene, regardless of case, spaces and a final full stop."""
    match = _CAPTION.fullmatch(" ".join(caption.lower().split()).rstrip("."))
    if match is None or match["c1"] == match["c2"]:
        raise UserError(
            f"the prompt {caption!r} is invalid: a shapes caption must be 'a <colour> <shape> <relation> a <colour> "
            f"<shape>' with two different colours of {', '.join(COLOURS)}; shapes are {', '.join(SHAPES)}; relations "
            f"are {', '.join(RELATIONS)}. Use such captions, or another reward for free text: reward=pickscore."
        )
    return Scene((match["c1"], match["s1"]), match["rel"], (match["c2"], match["s2"]))


def all_scenes() -> list[Scene]:
    """Return all 1080 scenes (30 ordered colour pairs x 9 shape pairs x 4 relations) in a fixed order."""
    return [
        Scene((c1, s1), relation, (c2, s2))
        for (c1, c2), s1, s2, relation in product(permutations(COLOURS, 2), SHAPES, SHAPES, RELATIONS)
    ]


@cache  # dev/pretrain.py calls it for every batch
def _shuffle_captions() -> tuple[str, ...]:
    captions = [scene.caption() for scene in all_scenes()]
    order = torch.randperm(len(captions), generator=torch.Generator().manual_seed(_SPLIT_SEED)).tolist()
    return tuple(captions[i] for i in order)


def eval_captions() -> list[str]:
    """Return the 64 held-out captions, which no training uses; they have every word of the grammar."""
    return list(_shuffle_captions()[:NUM_EVAL])


def train_captions() -> list[str]:
    """Return the 1016 training captions."""
    return list(_shuffle_captions()[NUM_EVAL:])


def coverage(shape: Tensor, centre: Tensor, radius: Tensor, size: int = IMAGE_SIZE) -> Tensor:
    """Return the share [B, size, size] of each pixel inside a shape, by the signed distance of the pixel's centre
    (antialiased).

    ``shape`` [B] are indices into ``SHAPES``, ``centre`` [B, 2] the centroids (x, y) and ``radius`` [B] the radii of
    discs of equal area, in pixels.
    """
    axis = torch.arange(size, device=centre.device, dtype=centre.dtype) + 0.5
    dx = axis[None, None, :] - centre[:, 0, None, None]
    dy = axis[None, :, None] - centre[:, 1, None, None]
    r = radius[:, None, None]
    disc = r - torch.sqrt(dx * dx + dy * dy + 1e-12)
    square = r * (torch.pi**0.5 / 2) - torch.maximum(dx.abs(), dy.abs())
    inradius = r * (torch.pi / 3**1.5) ** 0.5  # upright and equilateral: area = 3 sqrt(3) inradius^2
    triangle = torch.minimum(inradius - dy, inradius + dy / 2 - dx.abs() * (3**0.5 / 2))
    distances = torch.stack([disc, square, triangle], dim=1)  # [B, 3, size, size]
    distance = distances.gather(1, shape[:, None, None, None].expand(-1, 1, size, size))[:, 0]
    return (distance + 0.5).clamp(0, 1)
