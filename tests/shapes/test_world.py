"""The grammar of the captions, their split, and the renderer."""

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
    RELATIONS,
    SHAPES,
    Scene,
    all_scenes,
    coverage,
    eval_captions,
    parse_caption,
    train_captions,
)

SCENES = all_scenes()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def painted(image: Tensor, colour: str) -> Tensor:
    """Mask, bool [H, W], of the pixels of an image [3, H, W] with exactly this colour."""
    return (image - torch.tensor(COLOURS[colour])[:, None, None]).abs().amax(0) < 1e-5


def centre(mask: Tensor) -> Tensor:
    return mask.nonzero().double().mean(0).flip(0)  # x, y


def test_captions_of_the_1080_scenes_are_unique_and_parsed_back() -> None:
    assert len(SCENES) == 6 * 5 * 3 * 3 * 4 and all(scene.first[0] != scene.second[0] for scene in SCENES)
    captions = [scene.caption() for scene in SCENES]
    assert captions[0] == "a red circle above a green circle" and len(set(captions)) == 1080
    assert [parse_caption(caption) for caption in captions] == SCENES


def test_split_is_complete_and_the_one_of_the_embedded_models_training() -> None:
    held_out, train = eval_captions(), train_captions()
    assert (len(held_out), len(train)) == (64, 1016) and held_out == eval_captions()
    assert sorted(held_out + train) == sorted(scene.caption() for scene in SCENES)
    assert held_out[0] == "a yellow triangle right of a green circle"
    assert train[0] == "a purple square right of a green square"


@pytest.mark.parametrize("captions", [eval_captions(), train_captions()], ids=["held out", "train"])
def test_every_colour_shape_and_relation_occurs_on_both_sides(captions: list[str]) -> None:
    scenes = [parse_caption(caption) for caption in captions]
    for objects in ([scene.first for scene in scenes], [scene.second for scene in scenes]):
        assert [set(values) for values in zip(*objects, strict=True)] == [set(COLOURS), set(SHAPES)]
    assert {scene.relation for scene in scenes} == set(RELATIONS)


@pytest.mark.parametrize("caption", ["A Red circle LEFT of a blue square.", "  a red  circle left of an blue square "])
def test_parsing_ignores_case_spaces_articles_and_a_full_stop(caption: str) -> None:
    assert parse_caption(caption) == Scene(("red", "circle"), "left of", ("blue", "square"))


@pytest.mark.parametrize(
    "caption",
    [
        "a photo of a cat",
        "a red circle above a red square",
        "a red star above a blue square",
        "a red circle beside a blue square",
        "a red circle above a blue square and a green circle",
        "a circle red above a blue square",
    ],
)
def test_text_outside_the_grammar_is_an_error(caption: str) -> None:
    with pytest.raises(UserError) as error:
        parse_caption(caption)
    assert repr(caption) in str(error.value) and "another reward" in str(error.value)


@pytest.mark.parametrize("radius", [MIN_RADIUS, 4.7, MAX_RADIUS])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_shape_has_the_area_of_the_disc_of_its_radius_and_its_centroid_at_its_centre(shape: int, radius: float) -> None:
    centres = 15 + 3 * torch.rand(20, 2, generator=generator())
    masks = coverage(torch.full((20,), shape), centres, torch.full((20,), radius))
    areas, axis = masks.sum((1, 2)), torch.arange(IMAGE_SIZE) + 0.5
    # Antialiasing by distance rounds corners off, which moves the area a little.
    torch.testing.assert_close(areas, torch.full((20,), math.pi * radius**2), rtol=0.03, atol=0)
    centroids = torch.stack([masks.sum(1) @ axis, masks.sum(2) @ axis], dim=1) / areas[:, None]
    torch.testing.assert_close(centroids, centres, rtol=0, atol=0.15)


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


def test_rendering_is_a_function_of_the_generator_with_background_in_the_corners() -> None:
    one, same, other = (render(SCENES, generator(seed)) for seed in (1, 1, 2))
    assert one.shape == (1080, 3, IMAGE_SIZE, IMAGE_SIZE) and one.dtype == torch.float32
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert one.min() >= 0 and one.max() <= 1
    corners = one[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert torch.equal(corners, torch.tensor(BACKGROUND)[None, :, None].expand_as(corners))


def test_every_object_has_the_colour_and_position_of_the_caption() -> None:
    for scene, image in zip(SCENES[::5], render(SCENES[::5], generator(3)), strict=True):
        colours = scene.first[0], scene.second[0]
        first, second = (painted(image, colour) for colour in colours)
        assert min(first.sum(), second.sum()) > 20, scene
        x, y = (centre(second) - centre(first)).tolist()
        assert {"above": y, "below": -y, "left of": x, "right of": -x}[scene.relation] > 10, scene  # y grows downwards
        assert not any(painted(image, colour).any() for colour in COLOURS if colour not in colours), scene


def test_both_objects_are_fully_visible() -> None:
    """The tip of a triangle may cross the border, so scenes with triangles are excluded."""
    scenes = [scene for scene in SCENES if "triangle" not in (scene.first[1], scene.second[1])]
    background = torch.tensor(BACKGROUND)
    for scene, image in zip(scenes, render(scenes, generator(4)), strict=True):
        # Each pixel is a mixture of the background and one of two colours; solve for the shares of both.
        basis = torch.stack([torch.tensor(COLOURS[colour]) for colour, _ in (scene.first, scene.second)], dim=1)
        pixels = (image - background[:, None, None]).flatten(1)
        radii = (torch.linalg.lstsq(basis - background[:, None], pixels).solution.sum(1) / math.pi).sqrt()
        assert 0.98 * MIN_RADIUS < radii.min() and radii.max() < 1.02 * MAX_RADIUS, scene


def test_distractor_is_a_third_object_in_another_colour() -> None:
    scenes = SCENES[::9]
    plain, crowded = (render(scenes, generator(1), distractors=share) for share in (0.0, 1.0))
    changed = (plain - crowded).abs().amax(1) > 0.05  # [B, H, W]
    area = changed.sum((1, 2))
    assert (area >= 20).all() and (area <= 75).all()  # discs of radius 3 to 4 with their soft edges
    for scene, picture, where in zip(scenes, crowded, changed, strict=True):
        core = picture[:, where].T[:, None] - torch.tensor(list(COLOURS.values()))  # [pixels, 6, 3]
        nearest = core.square().sum(2).argmin(1).mode().values
        assert list(COLOURS)[int(nearest)] not in (scene.first[0], scene.second[0])


def test_distractors_is_the_share_of_pictures_with_one() -> None:
    plain, some = (render(SCENES[::2], generator(2), distractors=share) for share in (0.0, 0.4))
    share = ((plain - some).abs().amax((1, 2, 3)) > 0).float().mean()
    assert abs(share - 0.4) < 0.08  # 540 pictures: four standard errors
