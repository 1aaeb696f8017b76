"""Formula of PickScore, and its scale in low precision. test_clipscore.py tests the code shared with CLIPScore."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawings import FOUR, PROMPTS, all_pairs, shipped
from PIL import Image
from torch import Tensor
from transformers import CLIPModel, CLIPProcessor

from solrl_lightning.errors import UserError
from solrl_lightning.rewards import CLIPScore, PickScore


@pytest.fixture(scope="module")
def published(clip_folder: str, pil_processor: Any) -> Callable[[Image.Image, str], Tensor]:
    """1/26 of the score by the snippet in the README of PickScore's repository, for one image and one prompt."""
    model = CLIPModel.from_pretrained(clip_folder)
    tokenizer = CLIPProcessor.from_pretrained(clip_folder).tokenizer

    @torch.no_grad()
    def score(picture: Image.Image, prompt: str) -> Tensor:
        tokens = tokenizer(prompt, padding=True, truncation=True, max_length=77, return_tensors="pt")
        image = model.get_image_features(**pil_processor(images=picture, return_tensors="pt")).pooler_output
        text = model.get_text_features(**tokens).pooler_output
        image, text = image / torch.norm(image, dim=-1, keepdim=True), text / torch.norm(text, dim=-1, keepdim=True)
        return model.logit_scale.exp() * (text @ image.T)[0, 0] / 26

    return score


def test_scores_equal_the_published_snippet_on_pil_images(
    clip_folder: str, published: Callable[[Image.Image, str], Tensor], pictures: list[Image.Image]
) -> None:
    scores = all_pairs(PickScore(clip_folder, clip_folder), pictures)
    reference = torch.stack([torch.stack([published(picture, prompt) for prompt in PROMPTS]) for picture in pictures])
    assert reference.std(0).max() > 0.2  # a difference between images would show
    torch.testing.assert_close(scores, reference, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_score_is_the_cosine_times_the_logit_scale_in_float32_over_26(
    clip_folder: str, images: Tensor, dtype: str
) -> None:
    """bfloat16 rounds 4.6052 to 4.59375, which lowers scores by 1.1 %."""
    arguments = {"pretrained": clip_folder, "processor": clip_folder, "dtype": dtype}
    cosines = CLIPScore(**arguments)(images, FOUR)
    expected = cosines * math.exp(4.6052) / 26
    torch.testing.assert_close(shipped("pickscore", **arguments)(images, FOUR), expected, rtol=1e-4, atol=0)


def test_error_names_the_reward(clip_folder: str) -> None:
    with pytest.raises(UserError, match="reward.pickscore.pretrained=./missing is invalid: it must be a hub id"):
        PickScore("./missing", clip_folder)
