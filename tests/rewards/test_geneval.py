"""GenEval's rules on hand-made boxes, and its detector and colours with small models of the real classes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drawings import as_picture, as_tensor, drawn, shipped
from torch import Tensor
from torchvision.ops import nms
from transformers import CLIPModel, CLIPTokenizer, Owlv2ForObjectDetection, Owlv2Processor

from solrl_lightning.errors import UserError
from solrl_lightning.rewards.geneval import Box, GenEval, correct, crop, mean_of_terms, relations
from solrl_lightning.rewards.geneval_metadata import COLOURS, broken_rule

DOG = {"class": "dog", "count": 1}


def colours(objects: Sequence[Box], kind: str) -> list[str]:
    """Red for boxes in the left half of 100 pixels, blue for others."""
    return ["red" if each[0] < 50 else "blue" for each in objects]


LEFT, RIGHT, TOP, BOTTOM = (0, 40, 20, 60), (80, 40, 100, 60), (40, 0, 60, 20), (40, 80, 60, 100)


# Relations


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (LEFT, RIGHT, {"left of"}),
        (RIGHT, LEFT, {"right of"}),
        (TOP, BOTTOM, {"above"}),
        (BOTTOM, TOP, {"below"}),
        (LEFT, TOP, {"left of", "below"}),  # 45 degrees
        (LEFT, LEFT, set()),
        # Centres 4 apart, which a tenth of both widths (4) takes away; at 10 apart 6 of 10 are left.
        ((0, 0, 20, 20), (4, 0, 24, 20), set()),
        ((0, 0, 20, 20), (10, 0, 30, 20), {"left of"}),
        # 7 apart: 3 of 7 are left, less than a half, so there is an offset and no relation.
        ((0, 0, 20, 20), (7, 0, 27, 20), set()),
        ((0, 0, 100, 10), (10, 30, 110, 40), {"above"}),  # a tenth of both widths takes away all of the 10
    ],
)
def test_relations_have_a_margin_of_a_tenth_of_both_sizes(
    one: Sequence[float], other: Sequence[float], expected: set[str]
) -> None:
    assert relations(one, other) == expected


# Both scores


def scores(objects: dict[str, list[Box]], include: list[dict[str, Any]], **rest: Any) -> tuple[float, float]:
    metadata = {"include": include, **rest}
    assert broken_rule(metadata) == ""
    return correct(metadata, objects, colours), mean_of_terms(metadata, objects, colours)


def test_objects_are_counted() -> None:
    assert scores({"dog": [LEFT]}, [DOG]) == (1, 1)
    assert scores({"dog": []}, [DOG]) == scores({}, [DOG]) == (0, 0)
    assert scores({"dog": [LEFT, RIGHT]}, [DOG]) == (1, 0)  # GenEval allows more, Flow-GRPO's score counts
    include = [DOG, {"class": "cat", "count": 1}]
    assert scores({"dog": [LEFT], "cat": [TOP]}, include) == (1, 1)
    assert scores({"dog": [LEFT]}, include) == (0, 0.5)


@pytest.mark.parametrize(("number", "expected"), [(0, (0, 0)), (2, (0, 0.5)), (4, (1, 1)), (5, (0, 0.75)), (9, (0, 0))])
def test_counting_excludes_one_more(number: int, expected: tuple[float, float]) -> None:
    include, exclude = [{"class": "dog", "count": 4}], [{"class": "dog", "count": 5}]
    assert scores({"dog": [LEFT] * number}, include, exclude=exclude) == expected


def test_colours_are_those_of_the_objects_with_the_highest_scores() -> None:
    red, two = [{**DOG, "color": "red"}], [{"class": "dog", "count": 2, "color": "red"}]
    assert scores({"dog": [LEFT]}, red) == (1, 1)
    assert scores({"dog": [RIGHT]}, red) == (0, 0.5)
    assert scores({"dog": [LEFT, RIGHT]}, red) == (1, 0)
    assert scores({"dog": [RIGHT, LEFT]}, red) == (0, 0)
    assert scores({"dog": [LEFT, RIGHT]}, two) == (0, 0.75)
    assert scores({}, two) == (0, 0)


def test_position_is_relative_to_an_earlier_clause_that_holds() -> None:
    include = [DOG, {"class": "cat", "count": 1, "position": ["left of", 0]}]
    assert scores({"dog": [RIGHT], "cat": [LEFT]}, include) == (1, 1)
    assert scores({"dog": [LEFT], "cat": [RIGHT]}, include) == (0, 2 / 3)
    assert scores({"cat": [LEFT]}, include) == (0, pytest.approx(1 / 3))
    assert scores({"dog": [RIGHT]}, include) == (0, pytest.approx(1 / 3))
    assert scores({"dog": [RIGHT, LEFT], "cat": [LEFT]}, include) == (1, pytest.approx(1 / 3))
    coloured = [{**DOG, "color": "red"}, include[1]]
    assert scores({"dog": [RIGHT], "cat": [LEFT]}, coloured)[0] == 0
    two_red = [{"class": "dog", "count": 2, "color": "red"}, {**include[1], "position": ["above", 0]}]
    assert scores({"dog": [LEFT, BOTTOM], "cat": [TOP]}, two_red) == (1, 1)
    assert scores({"dog": [LEFT, RIGHT], "cat": [TOP]}, two_red) == (0, 2.5 / 4)  # one is blue


@pytest.mark.parametrize(
    ("metadata", "rule"),
    [
        ({"include": []}, '"include"'),
        ({"include": [{**DOG, "count": 17}]}, "from 1 to 16"),
        ({"include": [{**DOG, "colour": "red"}]}, "class, count, color, position; got 'colour'"),
        ({"include": [{**DOG, "color": "beige"}]}, "must be one of red, orange"),
        ({"include": [{**DOG, "position": ["above", 0]}]}, "an earlier clause"),
        ({"include": [DOG, {**DOG, "position": ["under", 0]}]}, "left of, right of, above, below"),
    ],
)
def test_prompt_with_other_metadata_is_an_error(reward: GenEval, metadata: dict[str, Any], rule: str) -> None:
    reward.check_prompts(["a dog"], [{"include": [DOG], "tag": "single_object"}])
    with pytest.raises(UserError, match=f"of the prompt 'two dogs' are invalid: reward=geneval needs .*{rule}"):
        reward.check_prompts(["a dog", "two dogs"], [{"include": [DOG]}, metadata])


# Models


@pytest.fixture(scope="module")
def reward(clip_folder: str, detector: str) -> GenEval:
    local = {"pretrained": clip_folder, "processor": clip_folder, "detector": detector}
    return shipped("geneval", **local, threshold=0.5, counting_threshold=0.6)


@pytest.mark.parametrize("size", [(96, 96), (80, 120)])
def test_objects_are_those_of_transformers_documented_usage(
    reward: GenEval, detector: str, size: tuple[int, int]
) -> None:
    pictures, kinds = [drawn(*size, seed) for seed in range(2)], ["dog", "cat"]
    with torch.no_grad():
        ours = reward.detect(torch.stack([as_tensor(picture) for picture in pictures]), kinds, 0.5)
    processor, model = Owlv2Processor.from_pretrained(detector), Owlv2ForObjectDetection.from_pretrained(detector)
    number = 0
    for picture, objects in zip(pictures, ours, strict=True):
        inputs = processor(text=[[f"a photo of a {kind}" for kind in kinds]], images=picture, return_tensors="pt")
        with torch.no_grad():
            outputs = model(**inputs)
        (theirs,) = processor.post_process_grounded_object_detection(outputs, 0.5, torch.tensor([size]))
        for label, kind in enumerate(kinds):
            boxes, marks = (theirs[key][theirs["labels"] == label] for key in ("boxes", "scores"))
            kept = nms(boxes, marks, 0.5)
            torch.testing.assert_close(torch.tensor(objects[kind]).view(-1, 4), boxes[kept], rtol=0, atol=1e-3)
            number += len(kept)
    assert number >= 8


def test_crop_is_within_the_image_and_has_a_pixel_or_more() -> None:
    image = torch.arange(3 * 4 * 6).view(3, 4, 6)
    assert torch.equal(crop(image, (1.4, 0.6, 3.6, 9.0)), image[:, 1:4, 1:4])
    assert crop(image, (-5, -5, -1, -1)).shape == crop(image, (9, 9, 20, 20)).shape == (3, 1, 1)


def test_colours_are_clips_zero_shot_classes_of_the_crop(
    reward: GenEval, clip_folder: str, pil_processor: Any, images: Tensor
) -> None:
    """Against transformers' CLIP with each template's embedding averaged, as clip_benchmark does."""
    model, tokenizer = CLIPModel.from_pretrained(clip_folder), CLIPTokenizer.from_pretrained(clip_folder)
    boxes = [(0, 0, 60, 60), (50, 20, 128, 96), (10, 40, 40, 90), (64, 0, 128, 48)]
    kind, expected, ours = "dog", [], []
    with torch.no_grad():
        classes = []
        for colour in COLOURS:
            texts = [
                f"a photo of a {words}"
                for words in (f"{colour} {kind}", f"{colour}-colored {kind}", f"{colour} object")
            ]
            each = model.get_text_features(**tokenizer(texts, padding=True, return_tensors="pt")).pooler_output
            mean = (each / each.norm(dim=-1, keepdim=True)).mean(0)
            classes.append(mean / mean.norm())
        for image, box in zip(images, boxes, strict=True):
            inputs = pil_processor(images=as_picture(image).crop(box), return_tensors="pt")
            embedding = model.get_image_features(**inputs).pooler_output[0]
            expected.append(COLOURS[int((torch.stack(classes) @ embedding).argmax())])
            ours += reward.colours(image, [box], kind)
    assert ours == expected and len(set(expected)) > 1


@pytest.mark.parametrize("text", ["four dogs", "a dog"], ids=["texts", "equal texts"])
def test_score_rates_each_image_by_its_own_metadata(reward: GenEval, images: Tensor, text: str) -> None:
    """Also of prompts that differ by their input images alone."""
    rows = [
        {"include": [DOG], "tag": "single_object"},
        {"include": [{**DOG, "count": 4}], "exclude": [{**DOG, "count": 5}], "tag": "counting"},
    ]
    prompts = ["a dog", "a dog", text, "a dog"]
    numbers = [0, 0, 1, 0]
    rated = reward(images, prompts, [rows[number] for number in numbers])
    for place, (image, number) in enumerate(zip(images, numbers, strict=True)):
        with torch.no_grad():
            (objects,) = reward.detect(image[None], ["dog"], (0.5, 0.6)[number])
        assert rated[place] == mean_of_terms(rows[number], objects, colours)
    assert rated.std() > 0 and ((rated >= 0) & (rated <= 1)).all()


def test_strict_score_is_0_or_1(clip_folder: str, detector: str, images: Tensor) -> None:
    strict = GenEval(clip_folder, clip_folder, detector, threshold=0.5, counting_threshold=0.6, strict=True)
    row = {"include": [{**DOG, "color": "red"}]}
    assert set(strict(images, ["a red dog"] * 4, [row] * 4).tolist()) <= {0.0, 1.0}
