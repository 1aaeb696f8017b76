"""Scenes of two coloured shapes: the caption grammar and the renderer.

A caption is ``a <colour> <shape> <relation> a <colour> <shape>``, for example "a red circle above a blue square". The
two colours differ, so a pixel's colour identifies its object. Lengths are in pixels of a 32 x 32 image. The origin is
the upper left corner, and y increases downwards.
"""

import re
from itertools import permutations, product
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.errors import UserError

IMAGE_SIZE = 32
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
DISTRACTOR_RADIUS = (3.0, 4.0)
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
    """The scene of a caption, regardless of case, spaces and a final full stop.

    Raises:
        UserError: the text is not in the grammar.
    """
    match = _CAPTION.fullmatch(" ".join(caption.lower().split()).rstrip("."))
    if match is None or match["c1"] == match["c2"]:
        raise UserError(
            f"the prompt {caption!r} is invalid: a shapes caption must be 'a <colour> <shape> <relation> a <colour> "
            f"<shape>' with two different colours of {', '.join(COLOURS)}; shapes are {', '.join(SHAPES)}; relations "
            f"are {', '.join(RELATIONS)}. Use such captions, or another reward for free text: reward=pickscore."
        )
    return Scene((match["c1"], match["s1"]), match["rel"], (match["c2"], match["s2"]))


def all_scenes() -> list[Scene]:
    """All 1080 scenes of the grammar (30 ordered colour pairs x 9 shape pairs x 4 relations) in a fixed order."""
    return [
        Scene((c1, s1), relation, (c2, s2))
        for (c1, c2), s1, s2, relation in product(permutations(COLOURS, 2), SHAPES, SHAPES, RELATIONS)
    ]


def coverage(shape: Tensor, centre: Tensor, radius: Tensor, size: int = IMAGE_SIZE) -> Tensor:
    """Share [B, size, size] of each pixel inside a shape, by the signed distance of the pixel's centre (antialiased).

    Args:
        shape: indices [B] into ``SHAPES``.
        centre: centroids [B, 2] as (x, y), in pixels.
        radius: radii [B] of the discs of equal area, in pixels.
        size: of the square image, in pixels.
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
    chosen = distances.gather(1, shape[:, None, None, None].expand(-1, 1, size, size))[:, 0]
    return (chosen + 0.5).clamp(0, 1)


def render(scenes: list[Scene], generator: torch.Generator, distractors: float = 0.0) -> Tensor:
    """Images [B, 3, 32, 32] in [0, 1] of the scenes, with sizes and positions drawn from ``generator``.

    A share ``distractors`` of the images has a third, smaller object that the caption does not mention.
    """
    batch = len(scenes)
    radius = MIN_RADIUS + (MAX_RADIUS - MIN_RADIUS) * torch.rand(batch, 2, generator=generator)
    apart = torch.rand(batch, 2, generator=generator) * 2.5 + 7.0  # distance of each object from the middle
    aside = (torch.rand(batch, 2, generator=generator) - 0.5) * 12.0  # across the relation's axis
    direction = torch.tensor([RELATIONS[scene.relation] for scene in scenes], dtype=torch.float32)
    across = direction.flip(1).abs()
    signs = torch.tensor([1.0, -1.0])[:, None]  # the second object lies opposite
    centre = IMAGE_SIZE / 2 + signs * apart[..., None] * direction[:, None] + aside[..., None] * across[:, None]
    shapes = torch.tensor([[SHAPES.index(scene.first[1]), SHAPES.index(scene.second[1])] for scene in scenes])
    colours = torch.tensor([[COLOURS[scene.first[0]], COLOURS[scene.second[0]]] for scene in scenes])
    image = torch.tensor(BACKGROUND)[None, :, None, None].expand(batch, 3, IMAGE_SIZE, IMAGE_SIZE)
    for i in range(2):
        mask = coverage(shapes[:, i], centre[:, i], radius[:, i])[:, None]
        image = image * (1 - mask) + colours[:, i, :, None, None] * mask
    return _add_distractors(image, scenes, centre, distractors, generator) if distractors else image


def _add_distractors(
    image: Tensor, scenes: list[Scene], centre: Tensor, share: float, generator: torch.Generator
) -> Tensor:
    """Draw third objects in another colour, each at the most distant of 8 random places."""
    batch = len(scenes)
    places = 4 + (IMAGE_SIZE - 8) * torch.rand(batch, 8, 2, generator=generator)
    room = torch.cdist(places, centre).amin(2)  # [B, 8]
    place = places[torch.arange(batch), room.argmax(1)]
    free = [[rgb for name, rgb in COLOURS.items() if name not in (s.first[0], s.second[0])] for s in scenes]
    pick = torch.randint(len(COLOURS) - 2, (batch,), generator=generator)
    colour = torch.tensor(free)[torch.arange(batch), pick]
    shape = torch.randint(len(SHAPES), (batch,), generator=generator)
    low, high = DISTRACTOR_RADIUS
    mask = coverage(shape, place, low + (high - low) * torch.rand(batch, generator=generator))[:, None]
    mask = mask * (torch.rand(batch, generator=generator) < share)[:, None, None, None]
    return image * (1 - mask) + colour[:, :, None, None] * mask
