"""Compares HPSv2 with open_clip's own pipeline on PIL images, and tests the errors about checkpoint files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import open_clip
import pytest
import torch
import torchvision.transforms.functional as vision
from drawings import PROMPTS, all_pairs
from huggingface_hub.errors import GatedRepoError
from open_clip.transform import image_transform
from PIL import Image
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.rewards import HPSv2

LONG = " ".join(["a red circle above a blue square"] * 20)  # far more than 77 tokens


@pytest.fixture(scope="module")
def reward(hps_file: str, open_clip_architecture: str) -> HPSv2:
    return HPSv2(hps_file, open_clip_architecture)


@pytest.fixture(scope="module")
def reference_model(hps_file: str, open_clip_architecture: str) -> Any:
    """open_clip's model with weights loaded by open_clip."""
    return open_clip.create_model(open_clip_architecture, pretrained=hps_file).eval()


def published_transform(picture: Image.Image) -> Tensor:
    """HPSv2's transform: converts to a float tensor, resizes the longest side to 224, pads with zeros, normalises."""
    image = vision.to_tensor(picture)
    scale = 224 / float(max(image.shape[1:]))
    high, wide = (round(pixels * scale) for pixels in image.shape[1:])
    image = vision.resize(image, [high, wide], vision.InterpolationMode.BICUBIC, antialias=True)
    down, right = 224 - high, 224 - wide
    image = vision.pad(image, [right // 2, down // 2, right - right // 2, down - down // 2], fill=0)
    return vision.normalize(image, open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)


@torch.no_grad()
def published(model: Any, architecture: str, pixels: list[Tensor], prompts: list[str]) -> Tensor:
    """Scores [B, U] of every image for every prompt, computed as in HPSv2's script."""
    text = open_clip.get_tokenizer(architecture)(prompts)
    return model.encode_image(torch.stack(pixels), normalize=True) @ model.encode_text(text, normalize=True).T


def message_of(pretrained: str | Path, architecture: str) -> str:
    with pytest.raises(UserError) as caught:
        HPSv2(str(pretrained), architecture)
    message = str(caught.value)
    assert "hpsv2" in message and message.endswith(".") and ".." not in message.replace("../", "")
    return message


def changed(hps_file: str, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the checkpoint with changed weights."""
    checkpoint = torch.load(hps_file, weights_only=True)
    change(checkpoint["state_dict"])
    torch.save(checkpoint, folder / "changed.pt")
    return folder / "changed.pt"


def test_scores_equal_the_published_pipeline_on_pil_images(
    reward: HPSv2, reference_model: Any, open_clip_architecture: str, pictures: list[Image.Image]
) -> None:
    scores = all_pairs(reward, pictures)
    pixels = [published_transform(picture) for picture in pictures]
    reference = published(reference_model, open_clip_architecture, pixels, PROMPTS)
    assert scores.dtype == torch.float32
    assert reference.std(0).max() > 0.05  # a difference between images would show
    torch.testing.assert_close(scores, reference, rtol=0, atol=1e-5)


def test_scores_are_close_to_open_clips_transform_that_resizes_in_pil(
    reward: HPSv2, reference_model: Any, open_clip_architecture: str, pictures: list[Image.Image]
) -> None:
    transform = image_transform(224, is_train=False, resize_mode="longest", interpolation="bicubic", fill_color=0)
    pixels = [transform(picture) for picture in pictures]
    reference = published(reference_model, open_clip_architecture, pixels, PROMPTS)
    torch.testing.assert_close(all_pairs(reward, pictures), reference, rtol=0, atol=1e-2)


def test_text_is_cut_at_77_tokens_with_the_end_token_kept(
    reward: HPSv2, reference_model: Any, open_clip_architecture: str, images: Tensor
) -> None:
    prompts = [LONG, LONG + " and a green triangle that nobody will ever read"]
    scores = reward(images[:2], prompts)
    pixels = [published_transform(vision.to_pil_image((image * 255).round().byte())) for image in images[:2]]
    reference = published(reference_model, open_clip_architecture, pixels, prompts).diagonal()
    torch.testing.assert_close(scores, reference, rtol=0, atol=1e-5)
    torch.testing.assert_close(reward(images[:1], prompts[:1]), reward(images[:1], prompts[1:]), rtol=0, atol=1e-6)


def test_equal_prompts_are_encoded_once_and_each_image_once(
    hps_file: str, open_clip_architecture: str, images: Tensor, rows_of: Callable[[nn.Module], list[int]]
) -> None:
    reward = HPSv2(hps_file, open_clip_architecture)
    texts, pictures = rows_of(reward.model.token_embedding), rows_of(reward.model.visual)
    scores = reward(images.repeat(3, 1, 1, 1), [PROMPTS[0]] * 6 + [PROMPTS[1]] * 6)
    assert texts == [2] and pictures == [12]
    one_by_one = [reward(images[place % 4, None], [PROMPTS[place // 6]]) for place in range(12)]
    torch.testing.assert_close(scores, torch.cat(one_by_one), rtol=0, atol=1e-6)


def test_model_is_frozen_and_no_submodule(reward: HPSv2, images: Tensor) -> None:
    holder = nn.Module()
    holder.reward = reward
    holder.train()
    assert not any(module.training for module in reward.model.modules())
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())
    assert not list(holder.parameters()) and not holder.state_dict()


def test_float16_weights_on_disk_are_cast_to_the_requested_dtype(
    reward: HPSv2, hps_file: str, open_clip_architecture: str, images: Tensor
) -> None:
    assert {parameter.dtype for parameter in reward.model.parameters()} == {torch.float32}
    low = HPSv2(hps_file, open_clip_architecture, dtype="bfloat16")
    assert {parameter.dtype for parameter in low.model.parameters()} == {torch.bfloat16}
    scores, prompts = low(images, PROMPTS + PROMPTS[:1]), PROMPTS + PROMPTS[:1]
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, reward(images, prompts), rtol=0, atol=2e-2)


def test_pretrained_may_be_a_folder_with_the_published_file(
    reward: HPSv2, hps_file: str, open_clip_architecture: str, images: Tensor
) -> None:
    from_folder = HPSv2(str(Path(hps_file).parent), open_clip_architecture)
    prompts = PROMPTS + PROMPTS[:1]
    assert torch.equal(from_folder(images, prompts), reward(images, prompts))


def test_published_file_of_a_hub_id_is_downloaded(
    reward: HPSv2, hps_file: str, open_clip_architecture: str, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, file: str) -> str:
        asked.append((name, file))
        return hps_file

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    prompts = PROMPTS + PROMPTS[:1]
    assert torch.equal(HPSv2("xswu/HPSv2", open_clip_architecture)(images, prompts), reward(images, prompts))
    assert asked == [("xswu/HPSv2", "HPS_v2.1_compressed.pt")]


@pytest.mark.parametrize("name", ["{tmp}/missing", "./missing", "missing.pt", "{tmp}"])
def test_missing_file_is_an_error_and_no_hub_id(name: str, open_clip_architecture: str, tmp_path: Path) -> None:
    name = name.format(tmp=tmp_path)
    message = message_of(name, open_clip_architecture)
    assert f"pretrained={name} is invalid" in message and "it holds no HPS_v2.1_compressed.pt" in message


@pytest.mark.parametrize(
    ("name", "step"), [("solrl-nobody/no-such-model", "`hf auth login`"), ("no such model", "Check the name.")]
)
def test_error_without_a_network_names_the_next_steps(
    name: str, step: str, open_clip_architecture: str, offline: Path
) -> None:
    message = message_of(name, open_clip_architecture)
    assert step in message
    assert "the path of a local HPS_v2.1_compressed.pt" in message


def test_error_about_a_gated_model_says_to_log_in(open_clip_architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise GatedRepoError("Access to this model is restricted", response=MagicMock())

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    message = message_of("solrl-nobody/gated", open_clip_architecture)
    assert "is gated: accept its licence" in message and "hf auth login" in message


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"these are no weights" * 100),
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        lambda file: file.write_bytes(b""),
    ],
    ids=["garbage", "cut off", "empty"],
)
def test_damaged_file_is_an_error(
    hps_file: str, open_clip_architecture: str, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    file = Path(shutil.copy(hps_file, tmp_path))
    damage(file)
    message = message_of(file, open_clip_architecture)
    assert str(file) in message and "cannot be read as weights" in message and "download it again" in message


def test_file_with_code_is_an_error(open_clip_architecture: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {"run": print}}, tmp_path / "code.pt")
    assert "cannot be read as weights" in message_of(tmp_path / "code.pt", open_clip_architecture)


@pytest.mark.parametrize("content", [{"model": {}}, [torch.ones(1)], {"state_dict": {"logit_scale": 4.6}}])
def test_file_of_another_layout_is_an_error(open_clip_architecture: str, tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "other.pt")
    assert "or under the key state_dict" in message_of(tmp_path / "other.pt", open_clip_architecture)


def test_missing_weights_are_an_error(hps_file: str, open_clip_architecture: str, tmp_path: Path) -> None:
    file = changed(hps_file, tmp_path, lambda weights: weights.pop("visual.proj"))
    assert "lacks 1 tensors, such as visual.proj" in message_of(file, open_clip_architecture)


def test_unexpected_weights_are_an_error(hps_file: str, open_clip_architecture: str, tmp_path: Path) -> None:
    file = changed(hps_file, tmp_path, lambda weights: weights.update(score_head=torch.ones(1)))
    assert "score_head" in message_of(file, open_clip_architecture)


def test_weights_of_another_shape_are_an_error_and_not_resized(
    hps_file: str, open_clip_architecture: str, tmp_path: Path
) -> None:
    file = changed(hps_file, tmp_path, lambda w: w.update({"visual.positional_embedding": torch.zeros(37, 32)}))
    message = message_of(file, open_clip_architecture)
    assert "visual.positional_embedding with [37, 32] for [50, 32]" in message
