"""The split into training and held-out captions."""

import pytest

from solrl_lightning.shapes.world import (
    COLOURS,
    RELATIONS,
    SHAPES,
    all_scenes,
    eval_captions,
    parse_caption,
    train_captions,
)


def test_split_is_complete_and_disjoint() -> None:
    held_out, train = eval_captions(), train_captions()
    assert len(held_out) == 64 and len(train) == 1016
    assert sorted(held_out + train) == sorted(scene.caption() for scene in all_scenes())
    assert len(set(held_out + train)) == 1080


def test_split_is_the_split_of_the_embedded_models_training() -> None:
    assert eval_captions() == eval_captions()
    assert eval_captions()[0] == "a yellow triangle right of a green circle"
    assert train_captions()[0] == "a purple square right of a green square"


@pytest.mark.parametrize("captions", [eval_captions(), train_captions()], ids=["held out", "train"])
def test_every_colour_shape_and_relation_occurs_on_both_sides(captions: list[str]) -> None:
    scenes = [parse_caption(caption) for caption in captions]
    for place in ("first", "second"):
        assert {getattr(scene, place)[0] for scene in scenes} == set(COLOURS)
        assert {getattr(scene, place)[1] for scene in scenes} == set(SHAPES)
    assert {scene.relation for scene in scenes} == set(RELATIONS)
