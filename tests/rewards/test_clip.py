"""CLIPScore, PickScore, HPSv2 and LAION's aesthetics against the published pipelines on PIL images.

The references are transformers' and open_clip's own forward passes, and for LAION's head matrices of numpy.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import open_clip
import pytest
import torch
import torchvision.transforms.functional as vision
from drawings import FOUR, LONG, PROMPTS, all_pairs, as_picture, padded, shipped
from open_clip.transform import image_transform
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPModel, CLIPProcessor

from solrl_lightning.errors import UserError
from solrl_lightning.rewards import CLIPScore, HPSv2, towers
from solrl_lightning.rewards.loading import floating_dtype

Published = Callable[[list[Image.Image], list[str]], Tensor]  # scores [B, U] of each picture for each prompt


@pytest.fixture(scope="module")
def make(clip_folder: str, hps_file: str, open_clip_architecture: str, aesthetic: str) -> Callable[..., Any]:
    """make("hpsv2", dtype="bfloat16") is the reward of the shipped configuration with small local models."""
    clip = {"pretrained": clip_folder, "processor": clip_folder}
    local = {"clipscore": clip, "pickscore": clip, "aesthetic": clip | {"head": aesthetic}}
    local |= {"hpsv2": {"pretrained": hps_file, "architecture": open_clip_architecture}}
    return cache(lambda name, **options: shipped(name, **local[name] | options))


@pytest.fixture(scope="module")
def published(
    clip_folder: str, hps_file: str, open_clip_architecture: str, aesthetic: str, pil_processor: Any
) -> dict[str, Published]:
    clip, tokenizer = CLIPModel.from_pretrained(clip_folder), CLIPProcessor.from_pretrained(clip_folder).tokenizer
    hps: Any = open_clip.create_model(open_clip_architecture, pretrained=hps_file).eval()
    tokenize = open_clip.get_tokenizer(open_clip_architecture)
    in_pil = image_transform(224, is_train=False, resize_mode="longest", interpolation="bicubic", fill_color=0)
    head = {name: value.double() for name, value in torch.load(aesthetic, weights_only=True).items()}

    def logits(pictures: list[Image.Image], prompts: list[str]) -> Tensor:
        tokens = tokenizer(prompts, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
        pixels = pil_processor(images=pictures, return_tensors="pt").pixel_values
        return clip(**tokens, pixel_values=pixels).logits_per_image

    def hpsv2(transform: Callable[[Image.Image], Tensor]) -> Published:
        def scores(pictures: list[Image.Image], prompts: list[str]) -> Tensor:
            images = hps.encode_image(torch.stack([transform(picture) for picture in pictures]), normalize=True)
            return images @ hps.encode_text(tokenize(prompts), normalize=True).T

        return scores

    def rating(pictures: list[Image.Image], prompts: list[str]) -> Tensor:
        pixels = pil_processor(images=pictures, return_tensors="pt").pixel_values
        values = clip.get_image_features(pixel_values=pixels).pooler_output.double()
        values = values / torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        for place in (0, 2, 4, 6, 7):  # of the linear layers in the published file
            values = values @ head[f"layers.{place}.weight"].T + head[f"layers.{place}.bias"]
        return values.float().expand(-1, len(prompts))

    normalized = lambda picture: vision.normalize(  # noqa: E731
        padded(picture), open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
    )
    references: dict[str, Published] = {
        "clipscore": lambda *both: logits(*both) / clip.logit_scale.exp(),
        "pickscore": lambda *both: logits(*both) / 26,
        "hpsv2": hpsv2(normalized),
        "hpsv2 resized by PIL": hpsv2(in_pil),
        "aesthetic": rating,
    }
    return {name: torch.no_grad()(score) for name, score in references.items()}


@pytest.mark.parametrize(
    ("reference", "tolerance", "spread"),
    [
        ("clipscore", 5e-4, 0.05),
        ("pickscore", 2e-3, 0.2),
        ("hpsv2", 1e-5, 0.05),
        ("hpsv2 resized by PIL", 1e-2, 0.05),
        ("aesthetic", 5e-4, 0.05),
    ],
)
def test_scores_equal_the_published_pipeline_on_pil_images(
    make: Callable[..., Any],
    published: dict[str, Published],
    pictures: list[Image.Image],
    reference: str,
    tolerance: float,
    spread: float,
) -> None:
    scores, expected = all_pairs(make(reference.split()[0]), pictures), published[reference](pictures, PROMPTS)
    assert scores.dtype == torch.float32
    assert expected.std(0).max() > spread  # a difference between images would show
    torch.testing.assert_close(scores, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("name", "tolerance"), [("clipscore", 5e-4), ("hpsv2", 1e-5)])
def test_text_is_cut_at_77_tokens_with_the_end_token_kept(
    make: Callable[..., Any], published: dict[str, Published], images: Tensor, name: str, tolerance: float
) -> None:
    reward, pictures = make(name), [as_picture(image) for image in images[:2]]
    prompts = [LONG, LONG + " and a triangle nobody reads"]
    scores = reward(images[:2], prompts)
    torch.testing.assert_close(scores, published[name](pictures, prompts).diagonal(), rtol=0, atol=tolerance)
    torch.testing.assert_close(reward(images[:1], prompts[:1]), reward(images[:1], prompts[1:]), rtol=0, atol=1e-6)
    assert (reward(images[:1], [LONG]) - reward(images[:1], [LONG[:40]])).abs() > 1e-3


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("clipscore", "bfloat16", 2e-2),
        ("clipscore", torch.float16, 2e-3),
        ("hpsv2", "bfloat16", 2e-2),
        ("aesthetic", "bfloat16", 2e-1),
    ],
)
def test_weights_are_frozen_in_the_requested_dtype_and_scores_are_float32(
    make: Callable[..., Any], images: Tensor, name: str, dtype: Any, tolerance: float
) -> None:
    reward = make(name, dtype=dtype)
    kinds = {(parameter.dtype, parameter.requires_grad) for parameter in reward.model.parameters()}
    assert kinds == {(reward.dtype, False)} and reward.dtype == getattr(torch, str(dtype).removeprefix("torch."))
    assert not any(module.training for module in reward.model.modules())
    scores = reward(images.clone().requires_grad_(), FOUR)
    assert scores.dtype == torch.float32 and not scores.requires_grad
    torch.testing.assert_close(scores, make(name)(images, FOUR), rtol=0, atol=tolerance)
    heads = getattr(reward, "head", nn.Module()).parameters()
    assert all((weight.dtype, weight.requires_grad) == (torch.float32, False) for weight in heads)


@pytest.mark.parametrize("dtype", ["float64", "half-ish", torch.int32])
def test_invalid_dtype_is_an_error(dtype: Any) -> None:
    with pytest.raises(UserError, match=r"reward\.clipscore\.dtype=.* is invalid: it must be float32, bfloat16 or f"):
        floating_dtype("clipscore", dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pickscore_is_the_cosine_times_the_logit_scale_in_float32_over_26(
    make: Callable[..., Any], images: Tensor, dtype: str
) -> None:
    """bfloat16 rounds 4.6052 to 4.59375, which lowers scores by 1.1 %."""
    expected = make("clipscore", dtype=dtype)(images, FOUR) * math.exp(4.6052) / 26
    torch.testing.assert_close(make("pickscore", dtype=dtype)(images, FOUR), expected, rtol=1e-4, atol=0)


def test_equal_prompts_are_encoded_once_in_chunks_and_scores_do_not_depend_on_the_batch(
    clip_folder: str, images: Tensor, rows_of: Callable[[nn.Module], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = CLIPScore(clip_folder, clip_folder)
    texts, pictures = rows_of(reward.model.text_model), rows_of(reward.model.vision_model)
    group, prompts = images.repeat(3, 1, 1, 1), [PROMPTS[0]] * 6 + [LONG] * 6
    scores = reward(group, prompts)
    assert texts == [2] and pictures == [12]
    one_by_one = [reward(image[None], [prompt]) for image, prompt in zip(group, prompts, strict=True)]
    torch.testing.assert_close(scores, torch.cat(one_by_one), rtol=0, atol=1e-6)
    whole = reward(images, FOUR)
    monkeypatch.setattr(towers, "_CHUNK", 3)
    torch.testing.assert_close(reward(images, FOUR), whole, rtol=0, atol=1e-6)
    assert texts[-2:] == pictures[-2:] == [3, 1]


def test_the_published_file_is_read_from_the_hub(
    make: Callable[..., Any],
    hps_file: str,
    open_clip_architecture: str,
    images: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *names: requests.append(names) or hps_file)
    scores = HPSv2("xswu/HPSv2", open_clip_architecture)(images, FOUR)
    assert torch.equal(scores, make("hpsv2")(images, FOUR)) and requests == [("xswu/HPSv2", "HPS_v2.1_compressed.pt")]
