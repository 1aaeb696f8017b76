"""LAION's aesthetic predictor against transformers and numpy; test_clipscore.py tests what it shares with others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawings import FOUR, all_pairs, shipped
from PIL import Image
from take_away import take_each_file_away
from torch import Tensor
from transformers import CLIPModel

from solrl_lightning.errors import UserError
from solrl_lightning.rewards.aesthetic import Aesthetic

PLACES = (0, 2, 4, 6, 7)  # of the linear layers in the published file


def write_head(file: Path, width: int = 24) -> Path:
    """A head with random weights in the published layout, whose scores differ as those of the published one do."""
    generator = torch.Generator().manual_seed(3)
    sizes = [width, 1024, 128, 64, 16, 1]
    weights = {}
    for place, wide, narrow in zip(PLACES, sizes, sizes[1:], strict=False):
        weights[f"layers.{place}.weight"] = torch.randn(narrow, wide, generator=generator) * wide**-0.5
        weights[f"layers.{place}.bias"] = torch.randn(narrow, generator=generator) * 0.1
    weights["layers.0.weight"] *= width**0.5  # its inputs have length 1
    weights["layers.7.bias"] += 5
    torch.save(weights, file)
    return file


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head") / "sac+logos+ava1-l14-linearMSE.pth")


@pytest.fixture(scope="module")
def reward(clip_folder: str, head: Path) -> Aesthetic:
    return shipped("aesthetic", pretrained=clip_folder, processor=clip_folder, head=str(head))


def test_scores_equal_the_published_formula_on_pil_images(
    reward: Aesthetic, clip_folder: str, head: Path, pil_processor: Any, pictures: list[Image.Image]
) -> None:
    scores = all_pairs(reward, pictures)
    with torch.no_grad():
        pixels = pil_processor(images=pictures, return_tensors="pt").pixel_values
        embeddings = CLIPModel.from_pretrained(clip_folder).get_image_features(pixel_values=pixels).pooler_output
    values = embeddings.double().numpy()
    values /= np.linalg.norm(values, axis=-1, keepdims=True)
    weights = torch.load(head, weights_only=True)
    for place in PLACES:
        matrix, bias = (weights[f"layers.{place}.{part}"].double().numpy() for part in ("weight", "bias"))
        values = values @ matrix.T + bias
    assert scores.dtype == torch.float32
    assert values.std() > 0.05  # a difference between images would show
    assert torch.equal(scores, scores[:, :1].expand_as(scores))  # the prompt has no effect
    np.testing.assert_allclose(scores[:, 0].double().numpy(), values[:, 0], rtol=0, atol=5e-4)


def test_head_may_be_a_folder_with_either_name(
    reward: Aesthetic, clip_folder: str, head: Path, tmp_path: Path, images: Tensor
) -> None:
    (tmp_path / "aesthetic-model.pth").write_bytes(head.read_bytes())
    for folder in (head.parent, tmp_path):
        assert torch.equal(Aesthetic(clip_folder, clip_folder, str(folder))(images, FOUR), reward(images, FOUR))


def test_head_is_frozen_and_float32_whatever_the_dtype_of_clip(clip_folder: str, head: Path, images: Tensor) -> None:
    low = Aesthetic(clip_folder, clip_folder, str(head), dtype="bfloat16")
    assert {(weight.dtype, weight.requires_grad) for weight in low.head.parameters()} == {(torch.float32, False)}
    assert low(images, FOUR).dtype == torch.float32


def test_error_about_an_unfit_or_missing_head(clip_folder: str, tmp_path: Path, offline: Path) -> None:
    wide, other = write_head(tmp_path / "wide.pth", width=768), tmp_path / "other.pth"
    torch.save({"layers.0.weight": torch.ones(2)}, other)
    for name, message in (
        (wide, r"it does not fit embeddings of 24 .* 0.weight with \[1024, 768\] for \[1024, 24\]"),
        (other, "it lacks 9 tensors"),
        (tmp_path, r"it holds no aesthetic-model.pth or sac\+logos"),
        ("no/where", "is neither a folder here nor"),
    ):
        with pytest.raises(UserError, match=f"reward.aesthetic.head={name} .*{message}"):
            Aesthetic(clip_folder, clip_folder, str(name))


def test_a_file_that_is_missing_is_named(clip_folder: str, head: Path, images: Tensor) -> None:
    folder = head.parent
    assert take_each_file_away(folder, lambda: [Aesthetic(clip_folder, clip_folder, str(folder))(images, FOUR)]) == {
        head.name: True
    }
