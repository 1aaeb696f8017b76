"""Compares preprocessing on tensors with the published pipelines on PIL images."""

from typing import Any

import pytest
import torch
import torchvision.transforms.functional as vision
from drawings import as_picture, as_tensor, drawn, padded
from PIL import Image
from torch import Tensor

from solrl_lightning.rewards.preprocessing import CropToSquare, pad_to_square

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
CLIP = CropToSquare(224, 224, 224, MEAN, STD)
ONE_LEVEL = 1.01 / 255 / min(STD)  # an 8-bit value that is rounded the other way, after normalisation


def batch_of(pictures: list[Image.Image]) -> Tensor:
    return torch.stack([as_tensor(picture) for picture in pictures])


def test_cropping_is_within_one_level_of_clips_processor_on_pil_images(
    pil_processor: Any, pictures: list[Image.Image]
) -> None:
    reference = pil_processor(images=pictures, return_tensors="pt").pixel_values
    difference = (CLIP(batch_of(pictures)) - reference).abs()
    assert difference.max() < ONE_LEVEL and difference.mean() < 1e-5


def test_padding_equals_the_published_transform(pictures: list[Image.Image]) -> None:
    reference = torch.stack([padded(picture) for picture in pictures])
    torch.testing.assert_close(pad_to_square(batch_of(pictures), 224), reference, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("height", "width"), [(300, 500), (500, 300), (100, 60)])
def test_padding_centres_the_whole_image_on_black(height: int, width: int) -> None:
    square = pad_to_square(torch.full((1, 3, height, width), 0.6), 224)[0, 0]
    high, wide = (round(pixels * 224 / max(height, width)) for pixels in (height, width))
    top, left = (224 - high) // 2, (224 - wide) // 2
    expected = torch.zeros(224, 224)
    expected[top : top + high, left : left + wide] = 0.6
    torch.testing.assert_close(square, expected)


def test_extremely_thin_image_keeps_one_pixel_when_padded() -> None:
    assert pad_to_square(torch.ones(1, 3, 2, 2000), 224).amax() > 0.5


@pytest.mark.parametrize("prepare", [CLIP, lambda images: pad_to_square(images, 224)], ids=["crop", "pad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_does_not_depend_on_the_batch_or_on_saving_as_png(prepare: Any, dtype: torch.dtype) -> None:
    decoded = torch.rand(3, 3, 96, 80, generator=torch.Generator().manual_seed(0)).to(dtype)
    prepared = prepare(decoded)
    assert prepared.dtype == torch.float32
    for result, image in zip(prepared, decoded, strict=True):
        torch.testing.assert_close(result, prepare(batch_of([as_picture(image)]))[0], rtol=0, atol=2e-6)


def test_crop_uses_the_given_size_and_statistics() -> None:
    image = as_tensor(drawn(60, 90, seed=1))[None]
    small = CropToSquare(40, 32, 30, [0.5, 0.4, 0.3], [0.2, 0.3, 0.4])(image)
    plain = CropToSquare(40, 40, 60, [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])(image)[..., 4:36, 15:45]
    torch.testing.assert_close(small, vision.normalize(plain, [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))
