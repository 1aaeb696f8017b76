"""The grammar of the captions and the renderer."""

import math

import pytest
import torch
from pretrain import render
from torch import Tensor

from solrl_lightning.errors import UserError
from solrl_lightning.shapes.world import (
    BACKGROUND,
    COLOURS,
    IMAGE_SIZE,
    MAX_RADIUS,
    MIN_RADIUS,
    SHAPES,
    Scene,
    all_scenes,
    coverage,
    parse_caption,
)

SCENES = all_scenes()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def painted(image: Tensor, colour: str) -> Tensor:
    """Mask, bool [H, W], of the pixels of an image [3, H, W] with exactly this colour."""
    return (image - torch.tensor(COLOURS[colour])[:, None, None]).abs().amax(0) < 1e-5


def centre(mask: Tensor) -> tuple[float, float]:
    ys, xs = mask.nonzero(as_tuple=True)
    return float(xs.double().mean()), float(ys.double().mean())


def test_there_are_1080_unique_scenes() -> None:
    assert len(SCENES) == len(set(SCENES)) == 6 * 5 * 3 * 3 * 4
    assert all(scene.first[0] != scene.second[0] for scene in SCENES)


def test_parsing_a_caption_restores_its_scene() -> None:
    captions = [scene.caption() for scene in SCENES]
    assert captions[0] == "a red circle above a green circle"
    assert len(set(captions)) == 1080
    assert [parse_caption(caption) for caption in captions] == SCENES


@pytest.mark.parametrize(
    "caption",
    [
        "a red circle left of a blue square",
        "A Red circle LEFT of a blue square.",
        "  a red  circle left of an blue square ",
    ],
)
def test_parsing_ignores_case_spaces_articles_and_a_full_stop(caption: str) -> None:
    assert parse_caption(caption) == Scene(("red", "circle"), "left of", ("blue", "square"))


@pytest.mark.parametrize(
    "caption",
    [
        "",
        "a photo of a cat",
        "a red circle",
        "a red circle above a red square",
        "a pink circle above a red square",
        "a red star above a blue square",
        "a red circle beside a blue square",
        "a red circle above a blue square and a green circle",
        "a circle red above a blue square",
    ],
)
def test_text_outside_the_grammar_is_an_error(caption: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_caption(caption)
    assert repr(caption) in str(caught.value) and "another reward" in str(caught.value)


@pytest.mark.parametrize("radius", [MIN_RADIUS, 4.7, MAX_RADIUS])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_every_shape_covers_the_area_of_the_disc_of_its_radius(shape: int, radius: float) -> None:
    centres = 16 + 3 * torch.rand(20, 2, generator=generator())
    areas = coverage(torch.full((20,), shape), centres, torch.full((20,), radius)).sum((1, 2))
    # Antialiasing by distance rounds corners off, which moves the area a little.
    torch.testing.assert_close(areas, torch.full((20,), math.pi * radius**2), rtol=0.03, atol=0)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_the_centre_of_a_shape_is_its_centroid(shape: int) -> None:
    centres = 14 + 4 * torch.rand(20, 2, generator=generator())
    masks = coverage(torch.full((20,), shape), centres, torch.full((20,), 5.0))
    axis = torch.arange(IMAGE_SIZE) + 0.5
    found = torch.stack([masks.sum(1) @ axis, masks.sum(2) @ axis], dim=1) / masks.sum((1, 2))[:, None]
    torch.testing.assert_close(found, centres, rtol=0, atol=0.15)


def test_coverage_is_between_0_and_1_and_the_shapes_are_correct() -> None:
    masks = coverage(torch.arange(3), torch.full((3, 2), 16.0), torch.full((3,), 5.6))
    assert masks.min() == 0 and masks.max() == 1
    circle, square, triangle = (mask > 0.5 for mask in masks)
    for mask in (circle, square):
        assert torch.equal(mask, mask.t()) and torch.equal(mask, mask.flip(0)) and torch.equal(mask, mask.flip(1))
    # Half the square's side is 5.6 sqrt(pi) / 2 = 4.96; the pixel 4.5 off both axes is 6.4 from the centre.
    assert square[11, 11] and not circle[11, 11] and square.sum() == 10 * 10
    assert circle[15, 10] and not square[15, 10]  # 5.5 off one axis
    widths = triangle.sum(1)
    rows = widths.nonzero().flatten()
    assert torch.equal(triangle, triangle.flip(1))
    assert widths[rows[0]] < widths[rows[len(rows) // 2]] < widths[rows[-1]]  # upright, growing downwards


def test_rendering_is_a_function_of_the_generator() -> None:
    one, same, other = (render(SCENES[:8], generator(seed)) for seed in (1, 1, 2))
    assert one.shape == (8, 3, IMAGE_SIZE, IMAGE_SIZE) and one.dtype == torch.float32
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_pixels_are_in_the_unit_interval_and_corners_are_background() -> None:
    images = render(SCENES, generator())
    assert images.min() >= 0 and images.max() <= 1
    background = torch.tensor(BACKGROUND)
    corners = images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert torch.equal(corners, background[None, :, None].expand_as(corners))


def test_every_object_has_the_colour_and_position_of_the_caption() -> None:
    for scene, image in zip(SCENES, render(SCENES, generator(3)), strict=True):
        first, second = (painted(image, colour) for colour in (scene.first[0], scene.second[0]))
        assert min(first.sum(), second.sum()) > 20, scene
        (x1, y1), (x2, y2) = centre(first), centre(second)
        distance = {"above": y2 - y1, "below": y1 - y2, "left of": x2 - x1, "right of": x1 - x2}  # y grows downwards
        assert distance[scene.relation] > 10, scene
        others = [colour for colour in COLOURS if colour not in (scene.first[0], scene.second[0])]
        assert not any(painted(image, colour).any() for colour in others), scene


def test_both_objects_are_fully_visible() -> None:
    """The tip of a triangle may cross the border, so scenes with triangles are excluded."""
    scenes = [scene for scene in SCENES if "triangle" not in (scene.first[1], scene.second[1])]
    images = render(scenes, generator(4))
    ink = torch.zeros(len(scenes))
    for which in range(2):
        for row, scene in enumerate(scenes):
            background = torch.tensor(BACKGROUND)
            colour = torch.tensor(COLOURS[scene[2 * which][0]])
            other = torch.tensor(COLOURS[scene[2 - 2 * which][0]])
            # Each pixel is a mixture of the background and one of two colours; solve for the share of this one.
            basis = torch.stack([colour - background, other - background], dim=1)
            share = torch.linalg.lstsq(basis, (images[row] - background[:, None, None]).flatten(1)).solution[0].sum()
            radius = (share / math.pi).sqrt()
            assert 0.98 * MIN_RADIUS < radius < 1.02 * MAX_RADIUS, scene
            ink[row] += share
    assert ink.min() > 2 * math.pi * MIN_RADIUS**2 * 0.97 and ink.max() < 2 * math.pi * MAX_RADIUS**2 * 1.03


def test_distractor_is_a_third_object_in_another_colour() -> None:
    scenes = all_scenes()[::9]
    plain = render(scenes, torch.Generator().manual_seed(1))
    crowded = render(scenes, torch.Generator().manual_seed(1), distractors=1.0)
    changed = (plain - crowded).abs().amax(1) > 0.05  # [B, H, W]
    area = changed.sum((1, 2))
    assert (area >= 20).all() and (area <= 75).all()  # discs of radius 3 to 4 with their soft edges
    for scene, picture, where in zip(scenes, crowded, changed, strict=True):
        core = picture[:, where].T[:, None] - torch.tensor(list(COLOURS.values()))  # [pixels, 6, 3]
        nearest = core.square().sum(2).argmin(1).mode().values
        assert list(COLOURS)[int(nearest)] not in (scene.first[0], scene.second[0])


def test_given_share_of_pictures_has_distractors() -> None:
    scenes = all_scenes()[::2]
    plain = render(scenes, torch.Generator().manual_seed(2))
    some = render(scenes, torch.Generator().manual_seed(2), distractors=0.4)
    share = ((plain - some).abs().amax((1, 2, 3)) > 0).float().mean()
    assert abs(share - 0.4) < 0.08  # 540 pictures: four standard errors
