"""LAION's aesthetic predictor against transformers and numpy; test_clipscore.py tests what it shares with others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawings import PROMPTS, all_pairs
from hydra.utils import instantiate
from PIL import Image
from torch import Tensor
from transformers import CLIPModel

from solrl_lightning.cli.config import ConfigTree
from solrl_lightning.errors import UserError
from solrl_lightning.rewards import Aesthetic

PLACES = (0, 2, 4, 6, 7)  # of the linear layers in the published file


def write_head(file: Path, width: int = 24) -> dict[str, Tensor]:
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
    return weights


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("head") / "sac+logos+ava1-l14-linearMSE.pth"
    write_head(file)
    return file


@pytest.fixture(scope="module")
def reward(clip_folder: str, head: Path) -> Aesthetic:
    return Aesthetic(clip_folder, clip_folder, str(head))


@pytest.fixture(scope="module")
def clip(clip_folder: str) -> CLIPModel:
    return CLIPModel.from_pretrained(clip_folder)


def test_scores_equal_the_published_formula_on_pil_images(
    reward: Aesthetic, clip: CLIPModel, head: Path, pil_processor: Any, pictures: list[Image.Image]
) -> None:
    scores = all_pairs(reward, pictures)
    with torch.no_grad():
        pixels = pil_processor(images=pictures, return_tensors="pt").pixel_values
        embeddings = clip.get_image_features(pixel_values=pixels).pooler_output
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
        again = Aesthetic(clip_folder, clip_folder, str(folder))
        assert torch.equal(again(images, [PROMPTS[0]] * 4), reward(images, [PROMPTS[0]] * 4))


def test_head_is_frozen_and_float32_whatever_the_dtype_of_clip(clip_folder: str, head: Path, images: Tensor) -> None:
    low = Aesthetic(clip_folder, clip_folder, str(head), dtype="bfloat16")
    assert {parameter.dtype for parameter in low.head.parameters()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in low.head.parameters())
    assert low(images, PROMPTS + PROMPTS[:1]).dtype == torch.float32


def test_shipped_configuration_builds_the_reward(clip_folder: str, head: Path) -> None:
    with ConfigTree() as tree:
        arguments = dict(tree.compose(["reward=aesthetic"]).reward.aesthetic)
    assert arguments.pop("weight") == 1
    local = {"pretrained": clip_folder, "processor": clip_folder, "head": str(head)}
    assert isinstance(instantiate(arguments | local, device="cpu"), Aesthetic)


def message_of(clip_folder: str, head: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        Aesthetic(clip_folder, clip_folder, str(head))
    return str(caught.value)


def test_head_of_other_embeddings_is_an_error(clip_folder: str, tmp_path: Path) -> None:
    write_head(tmp_path / "head.pth", width=768)
    message = message_of(clip_folder, tmp_path / "head.pth")
    assert "reward.aesthetic.head=" in message and "it does not fit embeddings of 24 numbers" in message
    assert "0.weight with [1024, 768] for [1024, 24]" in message


@pytest.mark.parametrize("content", [[torch.ones(2)], {"layers.0.weight": torch.ones(2)}, {"a": 1}])
def test_file_that_is_no_head_is_an_error(clip_folder: str, tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "head.pth")
    assert f"reward.aesthetic.head={tmp_path / 'head.pth'} is invalid" in message_of(clip_folder, tmp_path / "head.pth")


def test_missing_head_is_an_error(clip_folder: str, tmp_path: Path, offline: Path) -> None:
    assert "it holds no aesthetic-model.pth or sac+logos" in message_of(clip_folder, tmp_path)
    assert "reward.aesthetic.head=no/where is neither a folder here nor" in message_of(clip_folder, "no/where")
