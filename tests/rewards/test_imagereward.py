"""Compares ImageReward with the published package, and tests the use of every weight of its file.

``oracle/recorded`` holds a small model of the package's classes and its scores, written by dev/oracle/record.py.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawings import as_tensor, shipped
from PIL import Image
from safetensors.torch import load_file
from take_away import take_each_file_away
from torch import Tensor, nn
from transformers import BertTokenizer

from solrl_lightning.errors import UserError
from solrl_lightning.rewards import imagereward
from solrl_lightning.rewards.imagereward import ImageReward, load_tokenizer

RECORDED = Path(__file__).parent / "oracle" / "recorded"
ORACLE = json.loads((RECORDED / "scores.json").read_text())
PROMPTS: list[str] = ORACLE["prompts"]
SCORES = torch.tensor(ORACLE["scores"])  # [prompts, pictures]
PICTURES = [as_tensor(Image.open(RECORDED / f"{number}.png")) for number in range(SCORES.shape[1])]


def write_release(folder: Path, change: Callable[[dict[str, Tensor]], object] = lambda weights: None) -> str:
    """A folder in the layout of the hub with the recorded weights, changed by ``change``."""
    weights = {name: tensor.float() for name, tensor in load_file(RECORDED / "weights.safetensors").items()}
    change(weights)
    torch.save(weights, folder / "ImageReward.pt")
    shutil.copy(RECORDED / "med_config.json", folder)
    return str(folder)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_release(tmp_path_factory.mktemp("imagereward"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the vocabulary only, as in early versions of google-bert/bert-base-uncased."""
    folder = tmp_path_factory.mktemp("bert")
    shutil.copy(RECORDED / "vocab.txt", folder)
    return str(folder)


@pytest.fixture(scope="module")
def reward(pretrained: str, tokenizer: str) -> ImageReward:
    return shipped("imagereward", pretrained=pretrained, tokenizer=tokenizer)


def test_scores_equal_the_package_and_those_of_pictures_of_any_shape_the_package_on_pil_images(
    reward: ImageReward,
) -> None:
    rows = [reward(torch.stack([picture] * len(PROMPTS)), PROMPTS) for picture in PICTURES]
    errors = (torch.stack(rows, dim=1) - SCORES).abs()  # [prompts, pictures]
    unresized = [number for number, picture in enumerate(PICTURES) if picture.shape[1:] == (224, 224)]
    assert len(unresized) == 2 and SCORES[:, unresized].std() > 1
    assert errors[:, unresized].max() < 1e-4
    shapes = {tuple(picture.shape[1:]) for picture in PICTURES}
    assert {(130, 96), (96, 130), (180, 300), (64, 64), (257, 181)} < shapes
    assert errors.max() < 2e-2


def test_tokens_equal_the_package_with_35_tokens_and_cls_first(reward: ImageReward) -> None:
    inputs: list[Tensor] = []
    handle = reward.text_tower.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    reward(torch.zeros(len(PROMPTS), 3, 32, 32), PROMPTS)
    handle.remove()
    assert inputs[0].tolist() == ORACLE["tokens"]
    assert inputs[0].shape[1] == 35 and bool((inputs[0][:, 0] == reward.tokenizer.cls_token_id).all())
    size = len(reward.tokenizer)
    assert reward.tokenizer.convert_tokens_to_ids(["[DEC]", "[ENC]"]) == [size - 2, size - 1]


def test_image_is_embedded_once_in_batches_and_a_prompt_tokenised_once(
    pretrained: str, tokenizer: str, rows_of: Callable[[nn.Module], list[int]]
) -> None:
    reward = ImageReward(pretrained, tokenizer, batch=10)
    image_rows, joint_rows = rows_of(reward.image_tower), rows_of(reward.text_tower)
    tokenise, texts = reward.tokenizer, []

    def counted(prompts: list[str], **options: Any) -> Any:
        texts.append(prompts)
        return tokenise(prompts, **options)

    reward.tokenizer = counted  # type: ignore[assignment]
    scores = reward(torch.stack(PICTURES[:2] * 12), [PROMPTS[0]] * 24)
    assert image_rows == joint_rows == [10, 10, 4] and texts[0] == [PROMPTS[0]]
    torch.testing.assert_close(scores, SCORES[0, :2].repeat(12), rtol=0, atol=1e-4)
    torch.testing.assert_close(reward(PICTURES[1][None], PROMPTS[2:3]), SCORES[2:3, 1], rtol=0, atol=1e-4)


def test_each_weight_of_the_file_is_renamed_or_unused(reward: ImageReward) -> None:
    weights = load_file(RECORDED / "weights.safetensors")
    patterns = [*imagereward._RENAMED, *imagereward._UNUSED]
    assert {sum(bool(re.fullmatch(pattern, name)) for pattern in patterns) for name in weights} == {1}
    renamed = imagereward.rename(weights, "x")
    towers = {"image_tower": reward.image_tower, "text_tower": reward.text_tower, "head": reward.head}
    loaded = nn.ModuleDict(towers).state_dict()
    assert loaded.keys() == renamed.keys()
    for name, weight in loaded.items():
        assert torch.equal(weight, renamed[name].float()), name


def test_file_determines_the_size_of_the_image_tower(tokenizer: str, tmp_path: Path) -> None:
    def shrink(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if ".blocks.1." in name]:
            del weights[name]
        weights["blip.visual_encoder.pos_embed"] = weights["blip.visual_encoder.pos_embed"][:, :50]  # 7 x 7 patches

    config = ImageReward(write_release(tmp_path, shrink), tokenizer).image_tower.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (1, 128, 2)
    assert (config.image_size, config.patch_size, config.intermediate_size) == (112, 16, 128)


def test_model_is_frozen_with_towers_in_the_requested_dtype_and_the_head_in_float32(
    pretrained: str, tokenizer: str
) -> None:
    reward = ImageReward(pretrained, tokenizer, dtype="bfloat16")
    for part, dtype in (
        (reward.image_tower, torch.bfloat16),
        (reward.text_tower, torch.bfloat16),
        (reward.head, torch.float32),
    ):
        assert {(weight.dtype, weight.requires_grad) for weight in part.parameters()} == {(dtype, False)}
        assert not part.training
    scores = reward(torch.stack(PICTURES[:2]), [PROMPTS[0]] * 2)
    assert scores.dtype == torch.float32
    assert (scores - SCORES[0, :2]).abs().max() < 0.3  # the recorded weights amplify rounding


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("mlp.layers.4.bias"), "lacks 1 tensors, such as head.4.bias"),
        (lambda w: w.pop("blip.visual_encoder.patch_embed.proj.weight"), "lacks 1 tensors.*patch_embedding.weight"),
        (lambda w: w.update({"blip.temp": torch.zeros(())}), "has unexpectedly 1 tensors, such as blip.temp"),
        (lambda w: w.update({"mlp.layers.7.weight": torch.zeros(1, 8)}), r"head.7.weight with \[1, 8\] for \[1, 16\]"),
        (
            lambda w: w.update({"blip.visual_encoder.patch_embed.proj.weight": torch.zeros(96, 3, 16, 16)}),
            r"tensors have another shape, .* for \[1, 1, 96\]",
        ),
        (lambda w: (w.clear(), w.update({"model": torch.zeros(1)})), "such as model"),
    ],
)
def test_error_about_weights_names_one(
    change: Callable[[dict[str, Tensor]], object], message: str, tokenizer: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        ImageReward(write_release(tmp_path, change), tokenizer)


def test_tokenizer_saved_by_transformers_gives_the_same_tokens(
    tokenizer: str, reward: ImageReward, tmp_path: Path
) -> None:
    BertTokenizer.from_pretrained(tokenizer).save_pretrained(tmp_path)
    assert not (tmp_path / "vocab.txt").exists()
    loaded = load_tokenizer(str(tmp_path), len(reward.tokenizer))
    assert loaded(PROMPTS).input_ids == reward.tokenizer(PROMPTS).input_ids


def test_error_about_a_tokenizer_of_another_size(pretrained: str, tmp_path: Path) -> None:
    words = (RECORDED / "vocab.txt").read_text(encoding="utf-8").splitlines()
    (tmp_path / "vocab.txt").write_text("\n".join(words[:-1]) + "\n", encoding="utf-8")
    message = f"tokenizer=.* is invalid: the model has {len(words) + 2} tokens, and this tokenizer has {len(words) + 1}"
    with pytest.raises(UserError, match=message):
        ImageReward(pretrained, str(tmp_path))


def test_error_without_the_hub_has_the_download_command(pretrained: str, tokenizer: str, offline: Path) -> None:
    for arguments, message in (
        (("zai-org/ImageReward", tokenizer), "pretrained=zai-org/ImageReward is neither .* `hf download zai-org"),
        ((pretrained, "google-bert/x"), "tokenizer=google-bert/x is neither .* `hf download google"),
        ((pretrained, "./no"), "tokenizer=./no is invalid: .* holds no vocab.txt or tokenizer.json"),
    ):
        with pytest.raises(UserError, match=message):
            ImageReward(*arguments)


def test_a_file_that_is_missing_is_named_or_makes_no_difference(
    pretrained: str, tokenizer: str, tmp_path: Path
) -> None:
    BertTokenizer.from_pretrained(tokenizer).save_pretrained(tmp_path)

    def scores(words: str) -> list[Tensor]:
        return [ImageReward(pretrained, words)(PICTURES[0][None], PROMPTS[:1])]

    release = take_each_file_away(Path(pretrained), lambda: scores(tokenizer))
    assert release == {"ImageReward.pt": True, "med_config.json": True}
    assert take_each_file_away(Path(tokenizer), lambda: scores(tokenizer)) == {"vocab.txt": True}
    assert take_each_file_away(tmp_path, lambda: scores(str(tmp_path)))["tokenizer.json"]
    shutil.copy(RECORDED / "vocab.txt", tmp_path)
    assert not any(take_each_file_away(tmp_path, lambda: scores(str(tmp_path))).values())
