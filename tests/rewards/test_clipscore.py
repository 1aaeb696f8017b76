"""CLIPScore, and the code that PickScore shares with it: towers, batches, text, loading and its errors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from drawings import PROMPTS, all_pairs
from huggingface_hub.errors import GatedRepoError
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPModel, CLIPProcessor

from solrl_lightning.errors import UserError
from solrl_lightning.rewards import CLIPScore, towers

LONG = " ".join(["a red circle above a blue square"] * 20)  # far more than 77 tokens


@pytest.fixture(scope="module")
def reward(clip_folder: str) -> CLIPScore:
    return CLIPScore(clip_folder, clip_folder)


@pytest.fixture
def copied(clip_folder: str, tmp_path: Path) -> Path:
    """A copy of ``clip_folder`` that a test may change."""
    return Path(shutil.copytree(clip_folder, tmp_path / "copied"))


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def message_of(pretrained: str | Path, processor: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        CLIPScore(str(pretrained), str(processor))
    message = str(caught.value)
    assert "clipscore" in message and message.endswith(".") and ".." not in message.replace("../", "")
    return message


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
    pictures = [Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()) for image in images[:2]]
    prompts = [LONG, LONG + " and a green triangle that nobody will ever read"]
    scores = reward(images[:2], prompts)
    torch.testing.assert_close(scores, published(pictures, prompts).diagonal(), rtol=0, atol=5e-4)
    torch.testing.assert_close(reward(images[:1], prompts[:1]), reward(images[:1], prompts[1:]), rtol=0, atol=1e-6)
    assert (reward(images[:1], [LONG]) - reward(images[:1], [LONG[:40]])).abs() > 1e-3


def test_score_does_not_depend_on_the_other_prompts_of_the_batch(reward: CLIPScore, images: Tensor) -> None:
    alone = reward(images[:1], [PROMPTS[0]])
    torch.testing.assert_close(reward(images[:2], [PROMPTS[0], LONG])[:1], alone, rtol=0, atol=1e-6)


def test_equal_prompts_are_encoded_once_and_each_image_once(
    clip_folder: str, images: Tensor, rows_of: Callable[[nn.Module], list[int]]
) -> None:
    reward = CLIPScore(clip_folder, clip_folder)
    texts, pictures = rows_of(reward.model.text_model), rows_of(reward.model.vision_model)
    group = images.repeat(3, 1, 1, 1)
    scores = reward(group, [PROMPTS[0]] * 6 + [PROMPTS[1]] * 6)
    assert texts == [2] and pictures == [12]
    one_by_one = [reward(image[None], [PROMPTS[place // 6]]) for place, image in enumerate(group)]
    torch.testing.assert_close(scores, torch.cat(one_by_one), rtol=0, atol=1e-6)


def test_large_batch_is_split_into_chunks(
    clip_folder: str, images: Tensor, rows_of: Callable[[nn.Module], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = CLIPScore(clip_folder, clip_folder)
    prompts = [*PROMPTS, "a fourth prompt"]
    whole = reward(images, prompts)
    monkeypatch.setattr(towers, "_CHUNK", 3)
    texts, pictures = rows_of(reward.model.text_model), rows_of(reward.model.vision_model)
    torch.testing.assert_close(reward(images, prompts), whole, rtol=0, atol=1e-6)
    assert texts == pictures == [3, 1]


def test_model_is_frozen_and_no_submodule(clip_folder: str, images: Tensor) -> None:
    holder = nn.Module()
    holder.reward = CLIPScore(clip_folder, clip_folder)
    holder.train()
    model = holder.reward.model
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not list(holder.parameters()) and not holder.state_dict()
    assert not holder.reward(images.requires_grad_(), PROMPTS + PROMPTS[:1]).requires_grad


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2e-2), (torch.float16, 2e-3)])
def test_weights_have_the_requested_dtype_and_scores_are_float32(
    reward: CLIPScore, clip_folder: str, images: Tensor, dtype: str | torch.dtype, tolerance: float
) -> None:
    low = CLIPScore(clip_folder, clip_folder, dtype=dtype)
    assert {parameter.dtype for parameter in low.model.parameters()} == {low.dtype} != {torch.float32}
    prompts = PROMPTS + PROMPTS[:1]
    scores = low(images, prompts)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, reward(images, prompts), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float64", "int8", "half-ish", torch.int32])
def test_invalid_dtype_is_an_error(clip_folder: str, dtype: str | torch.dtype) -> None:
    with pytest.raises(UserError, match=r"reward\.clipscore\.dtype=.* is invalid: it must be float32, bfloat16 or f"):
        CLIPScore(clip_folder, clip_folder, dtype=dtype)


def test_folder_of_transformers_4_gives_the_same_scores(
    reward: CLIPScore, clip_folder: str, copied: Path, images: Tensor
) -> None:
    """openai/clip-vit-large-patch14 on the hub has sizes as numbers, the end token 2, and positions as tensors."""
    settings = json.loads((copied / "processor_config.json").read_text())["image_processor"]
    settings |= {"size": 224, "crop_size": 224, "feature_extractor_type": "CLIPFeatureExtractor"}
    for key in ("image_processor_type", "do_convert_rgb", "do_rescale", "rescale_factor"):
        settings.pop(key, None)
    (copied / "preprocessor_config.json").write_text(json.dumps(settings))
    (copied / "processor_config.json").unlink()
    edit(copied / "config.json", lambda config: config["text_config"].update(eos_token_id=2))
    numbering = {
        "text_model.embeddings.position_ids": torch.arange(77)[None],
        "vision_model.embeddings.position_ids": torch.arange(50)[None],
    }
    edit_weights(copied, lambda weights: weights.update(numbering))
    old, prompts = CLIPScore(str(copied), str(copied)), PROMPTS + PROMPTS[:1]
    torch.testing.assert_close(old(images, prompts), reward(images, prompts), rtol=0, atol=1e-6)


def test_images_are_normalised_with_the_statistics_of_the_processor(
    reward: CLIPScore, clip_folder: str, copied: Path, images: Tensor
) -> None:
    statistics = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}
    edit(copied / "processor_config.json", lambda config: config["image_processor"].update(statistics))
    changed = CLIPScore(clip_folder, str(copied))
    seen: list[Tensor] = []
    changed.model.vision_model.register_forward_pre_hook(
        lambda _, positional, named: seen.append(named["pixel_values"]), with_kwargs=True
    )
    changed(torch.full((1, 3, 8, 8), 0.6), PROMPTS[:1])
    expected = [(153 / 255 - mean) / std for mean, std in zip(*statistics.values(), strict=True)]
    torch.testing.assert_close(seen[0].amax((0, 2, 3)), torch.tensor(expected), rtol=0, atol=1e-5)


def test_tilde_in_a_path_is_expanded(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(copied.parent))
    assert CLIPScore("~/copied", "~/copied").logit_scale == pytest.approx(100, rel=1e-4)


@pytest.mark.parametrize("name", ["{tmp}/missing", "./missing", "../missing"])
@pytest.mark.parametrize("argument", ["pretrained", "processor"])
def test_missing_folder_is_an_error_and_no_hub_id(argument: str, name: str, clip_folder: str, tmp_path: Path) -> None:
    name = name.format(tmp=tmp_path)
    message = message_of(*((name, clip_folder) if argument == "pretrained" else (clip_folder, name)))
    assert f"{argument}={name}" in message and "must be a hub id or a local folder" in message


@pytest.mark.parametrize("argument", ["pretrained", "processor"])
def test_error_without_a_network_names_the_next_steps(argument: str, clip_folder: str, offline: Path) -> None:
    name = "solrl-nobody/no-such-model"
    message = message_of(*((name, clip_folder) if argument == "pretrained" else (clip_folder, name)))
    assert f"{argument}={name}" in message
    assert "HF_HUB_OFFLINE" in message and "hf auth login" in message and "a local folder" in message


def test_text_that_is_no_hub_id_is_an_error(clip_folder: str, offline: Path) -> None:
    assert "Check the name" in message_of("no such model", clip_folder)


def test_error_about_a_gated_model_says_to_log_in(
    clip_folder: str, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise GatedRepoError("403 Client Error", response=MagicMock())

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    message = message_of("solrl-nobody/gated", clip_folder)
    assert "gated" in message and "hf auth login" in message


def test_model_of_another_architecture_is_an_error(clip_folder: str, copied: Path) -> None:
    edit(copied / "config.json", lambda config: config.update(model_type="siglip"))
    assert "must be a CLIP model of type clip, and is a siglip" in message_of(copied, clip_folder)


@pytest.mark.parametrize("change", [lambda w: w.pop("visual_projection.weight"), lambda w: w.pop("logit_scale")])
def test_missing_weights_are_an_error(
    clip_folder: str, copied: Path, change: Callable[[dict[str, Tensor]], object]
) -> None:
    edit_weights(copied, change)
    assert "lacks 1 tensors, such as" in message_of(copied, clip_folder)


def test_unexpected_weights_are_an_error(clip_folder: str, copied: Path) -> None:
    edit_weights(copied, lambda weights: weights.update({"score_head.weight": torch.ones(3)}))
    assert "score_head.weight" in message_of(copied, clip_folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"these are no weights" * 100),
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        lambda file: file.unlink(),
        lambda file: edit(file.parent / "config.json", lambda config: config["text_config"].update(hidden_size=16)),
    ],
    ids=["garbage", "cut off", "missing", "other size"],
)
def test_unreadable_weights_are_an_error(clip_folder: str, copied: Path, damage: Callable[[Path], object]) -> None:
    damage(copied / "model.safetensors")
    message = message_of(copied, clip_folder)
    assert "its weights cannot be read" in message and "Download the model again" in message


@pytest.mark.parametrize("file", ["processor_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_processor_is_an_error(clip_folder: str, copied: Path, file: str) -> None:
    (copied / file).write_text('{"cut of')
    assert f"processor={copied} is invalid: it cannot be loaded" in message_of(clip_folder, copied)


@pytest.mark.parametrize(
    "change, found",
    [
        ({"crop_size": {"height": 192, "width": 192}}, "makes images of 192 x 192"),
        ({"do_center_crop": False}, "do_center_crop=false"),
        ({"resample": 2}, "resample=2"),
        ({"size": {"height": 224, "width": 224}}, "size="),
        ({"size": {"shortest_edge": 200}}, "'shortest_edge': 200"),
    ],
)
def test_processor_with_other_steps_is_an_error(
    clip_folder: str, copied: Path, change: dict[str, Any], found: str
) -> None:
    edit(copied / "processor_config.json", lambda config: config["image_processor"].update(change))
    message = message_of(clip_folder, copied)
    assert found in message and "Set reward.clipscore.processor" in message


def test_tokenizer_of_another_model_is_an_error(clip_folder: str, copied: Path) -> None:
    edit(copied / "config.json", lambda config: config["text_config"].update(eos_token_id=5))
    assert "expects 5" in message_of(copied, clip_folder)
