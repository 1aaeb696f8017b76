"""CLIPScore, and the code that PickScore shares with it: towers, batches, text, loading and its errors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawings import FOUR, LONG, PROMPTS, all_pairs, as_picture, shipped
from PIL import Image
from safetensors.torch import load_file, save_file
from take_away import take_each_file_away
from torch import Tensor, nn
from transformers import CLIPModel, CLIPProcessor

from solrl_lightning.errors import UserError
from solrl_lightning.rewards import CLIPScore, towers


@pytest.fixture(scope="module")
def reward(clip_folder: str) -> CLIPScore:
    return shipped("clipscore", pretrained=clip_folder, processor=clip_folder)


@pytest.fixture
def copied(clip_folder: str, tmp_path: Path) -> Path:
    """A copy of ``clip_folder`` that a test may change."""
    return Path(shutil.copytree(clip_folder, tmp_path / "copied"))


def edit(file: Path, part: str | None = None, **values: Any) -> None:
    content = json.loads(file.read_text())
    (content[part] if part else content).update(values)
    file.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def published(clip_folder: str, pil_processor: Any) -> Callable[[list[Image.Image], list[str]], Tensor]:
    """published(pictures, prompts) returns cosines [B, U] of transformers' own processor and forward pass."""
    model = CLIPModel.from_pretrained(clip_folder)
    tokenizer = CLIPProcessor.from_pretrained(clip_folder).tokenizer

    @torch.no_grad()
    def cosines(pictures: list[Image.Image], prompts: list[str]) -> Tensor:
        tokens = tokenizer(prompts, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
        pixels = pil_processor(images=pictures, return_tensors="pt").pixel_values
        return model(**tokens, pixel_values=pixels).logits_per_image / model.logit_scale.exp()

    return cosines


def test_scores_equal_the_published_pipeline_on_pil_images(
    reward: CLIPScore, published: Callable[..., Tensor], pictures: list[Image.Image]
) -> None:
    scores, reference = all_pairs(reward, pictures), published(pictures, PROMPTS)
    assert scores.dtype == torch.float32
    assert reference.std(0).max() > 0.05  # a difference between images would show
    torch.testing.assert_close(scores, reference, rtol=0, atol=5e-4)


def test_text_is_cut_at_77_tokens_with_the_end_token_kept(
    reward: CLIPScore, published: Callable[..., Tensor], images: Tensor
) -> None:
    pictures, prompts = [as_picture(image) for image in images[:2]], [LONG, LONG + " and a triangle nobody reads"]
    scores = reward(images[:2], prompts)
    torch.testing.assert_close(scores, published(pictures, prompts).diagonal(), rtol=0, atol=5e-4)
    torch.testing.assert_close(reward(images[:1], prompts[:1]), reward(images[:1], prompts[1:]), rtol=0, atol=1e-6)
    assert (reward(images[:1], [LONG]) - reward(images[:1], [LONG[:40]])).abs() > 1e-3


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


def test_model_is_frozen_and_no_submodule(reward: CLIPScore, images: Tensor) -> None:
    holder = nn.Module()
    holder.reward = reward
    holder.train()
    assert not any(module.training for module in reward.model.modules())
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())
    assert not list(holder.parameters()) and not holder.state_dict()
    assert not reward(images.clone().requires_grad_(), FOUR).requires_grad


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), (torch.float16, 2e-3)])
def test_weights_have_the_requested_dtype_and_scores_are_float32(
    reward: CLIPScore, clip_folder: str, images: Tensor, dtype: str | torch.dtype, tolerance: float
) -> None:
    low = CLIPScore(clip_folder, clip_folder, dtype=dtype)
    assert {parameter.dtype for parameter in low.model.parameters()} == {low.dtype} != {torch.float32}
    scores = low(images, FOUR)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, reward(images, FOUR), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float64", "half-ish", torch.int32])
def test_invalid_dtype_is_an_error(clip_folder: str, dtype: str | torch.dtype) -> None:
    with pytest.raises(UserError, match=r"reward\.clipscore\.dtype=.* is invalid: it must be float32, bfloat16 or f"):
        CLIPScore(clip_folder, clip_folder, dtype=dtype)


def test_folder_of_transformers_4_gives_the_same_scores(
    reward: CLIPScore, copied: Path, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """openai/clip-vit-large-patch14 on the hub has sizes as numbers, the end token 2, and positions as tensors."""
    settings = json.loads((copied / "processor_config.json").read_text())["image_processor"]
    settings |= {"size": 224, "crop_size": 224, "feature_extractor_type": "CLIPFeatureExtractor"}
    for key in ("image_processor_type", "do_convert_rgb", "do_rescale", "rescale_factor"):
        settings.pop(key, None)
    (copied / "preprocessor_config.json").write_text(json.dumps(settings))
    (copied / "processor_config.json").unlink()
    edit(copied / "config.json", "text_config", eos_token_id=2)
    positions = {"text_model": torch.arange(77)[None], "vision_model": torch.arange(50)[None]}
    numbering = {f"{tower}.embeddings.position_ids": numbers for tower, numbers in positions.items()}
    edit_weights(copied, lambda weights: weights.update(numbering))
    monkeypatch.setenv("HOME", str(copied.parent))
    old = CLIPScore("~/copied", "~/copied")
    torch.testing.assert_close(old(images, FOUR), reward(images, FOUR), rtol=0, atol=1e-6)


def test_images_are_normalised_with_the_statistics_of_the_processor(clip_folder: str, copied: Path) -> None:
    statistics = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}
    edit(copied / "processor_config.json", "image_processor", **statistics)
    reward = CLIPScore(clip_folder, str(copied))
    inputs: list[Tensor] = []
    reward.model.vision_model.register_forward_pre_hook(
        lambda _, args, options: inputs.append(options["pixel_values"]), with_kwargs=True
    )
    reward(torch.full((1, 3, 8, 8), 0.6), PROMPTS[:1])
    expected = [(153 / 255 - mean) / std for mean, std in zip(*statistics.values(), strict=True)]
    torch.testing.assert_close(inputs[0].amax((0, 2, 3)), torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./missing", r"is invalid: it must be a hub id or a local folder"),
        ("solrl-nobody/no-such-model", "HF_HUB_OFFLINE.*hf auth login.*a local folder"),
        ("no such model", "is neither a local path nor a hub id .* Check the name"),
    ],
)
@pytest.mark.parametrize("argument", ["pretrained", "processor"])
def test_error_about_a_missing_model_names_the_next_step(
    argument: str, name: str, message: str, clip_folder: str, offline: Path
) -> None:
    with pytest.raises(UserError, match=rf"reward\.clipscore\.{argument}={name} .*{message}"):
        CLIPScore(**{"pretrained": clip_folder, "processor": clip_folder} | {argument: name})


UNREADABLE = "its weights cannot be read as those of a CLIP model: .* Download the model again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: edit(f / "config.json", model_type="siglip"), "must be a CLIP model of type clip, and is a siglip"),
        (lambda f: edit_weights(f, lambda w: w.pop("logit_scale")), "lacks 1 tensors, such as logit_scale"),
        (lambda f: edit_weights(f, lambda w: w.update(head=torch.ones(3))), "has unexpectedly 1 tensors, such as head"),
        (lambda f: edit(f / "config.json", "text_config", hidden_size=16), UNREADABLE),
    ],
)
def test_error_about_unfit_weights(
    clip_folder: str, copied: Path, change: Callable[[Path], object], message: str
) -> None:
    change(copied)
    with pytest.raises(UserError, match=rf"reward\.clipscore\.pretrained={copied} is invalid: .*{message}"):
        CLIPScore(str(copied), clip_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crop_size": {"height": 192, "width": 192}}, "makes images of 192 x 192"),
        ({"do_center_crop": False}, "do_center_crop=false. Set reward.clipscore.processor"),
        ({"resample": 2}, "resample=2. Set reward.clipscore.processor"),
        ({"size": {"height": 224, "width": 224}}, "size="),
        ({"size": {"shortest_edge": 200}}, "'shortest_edge': 200"),
        (lambda f: edit(f / "config.json", "text_config", eos_token_id=5), "expects 5"),
    ],
)
def test_error_about_an_unfit_processor(copied: Path, change: Any, message: str) -> None:
    if isinstance(change, dict):
        edit(copied / "processor_config.json", "image_processor", **change)
    else:
        change(copied)
    with pytest.raises(UserError, match=rf"reward\.clipscore\.(processor|pretrained)={copied} is invalid: .*{message}"):
        CLIPScore(str(copied), str(copied))


def test_a_file_that_is_missing_is_named_or_makes_no_difference(copied: Path, images: Tensor) -> None:
    def scores() -> list[Tensor]:
        return [CLIPScore(str(copied), str(copied))(images[:1], PROMPTS[:1])]

    assert all(take_each_file_away(copied, scores).values())
    words = json.loads((copied / "tokenizer.json").read_text())["model"]  # from before there was a tokenizer.json
    (copied / "vocab.json").write_text(json.dumps(words["vocab"]))
    (copied / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, words["merges"])]))
    settings = json.loads((copied / "processor_config.json").read_text())["image_processor"]
    (copied / "preprocessor_config.json").write_text(json.dumps(settings))
    (copied / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    (copied / "tokenizer.json").unlink()
    needed = take_each_file_away(copied, scores)
    assert [name for name, required in needed.items() if not required] == ["processor_config.json"]
