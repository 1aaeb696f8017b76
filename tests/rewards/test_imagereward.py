"""Compares ImageReward with the published package, and tests the use of every weight of its file.

``oracle/recorded`` holds a small model of the package's classes and the package's scores, written by oracle/record.py.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor
from transformers import BertTokenizer

from solrl_lightning.errors import UserError
from solrl_lightning.rewards import imagereward
from solrl_lightning.rewards.imagereward import ImageReward, load_tokenizer, preprocess

RECORDED = Path(__file__).parent / "oracle" / "recorded"
ORACLE = json.loads((RECORDED / "scores.json").read_text())
PROMPTS: list[str] = ORACLE["prompts"]
SCORES = torch.tensor(ORACLE["scores"])  # [prompts, pictures]
PICTURES = [pil_to_tensor(Image.open(RECORDED / f"{number}.png")) / 255 for number in range(SCORES.shape[1])]


def release(folder: Path, change: Callable[[dict[str, Tensor]], object] = lambda weights: None) -> str:
    """A folder in the layout of the hub with the recorded weights, changed by ``change``."""
    weights = {name: tensor.float() for name, tensor in load_file(RECORDED / "weights.safetensors").items()}
    change(weights)
    torch.save(weights, folder / "ImageReward.pt")
    shutil.copy(RECORDED / "med_config.json", folder)
    return str(folder)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    return release(tmp_path_factory.mktemp("imagereward"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the vocabulary only, as in early versions of google-bert/bert-base-uncased."""
    folder = tmp_path_factory.mktemp("bert")
    shutil.copy(RECORDED / "vocab.txt", folder)
    return str(folder)


@pytest.fixture(scope="module")
def reward(pretrained: str, tokenizer: str) -> ImageReward:
    return ImageReward(pretrained, tokenizer)


@pytest.fixture(scope="module")
def errors(reward: ImageReward) -> Tensor:
    """Absolute differences [prompts, pictures] from the package's scores. One call scores all prompts of a picture."""
    rows = [reward(torch.stack([picture] * len(PROMPTS)), PROMPTS) for picture in PICTURES]
    return (torch.stack(rows, dim=1) - SCORES).abs()


def test_scores_of_the_same_pixels_equal_the_package(errors: Tensor) -> None:
    unresized = [number for number, picture in enumerate(PICTURES) if picture.shape[1:] == (224, 224)]
    assert len(unresized) == 2 and SCORES[:, unresized].std() > 1
    assert errors[:, unresized].max() < 1e-4


def test_scores_of_pictures_of_any_shape_equal_the_package_on_pil_images(errors: Tensor) -> None:
    shapes = {tuple(picture.shape[1:]) for picture in PICTURES}
    assert {(130, 96), (96, 130), (180, 300), (64, 64), (257, 181)} < shapes
    assert errors.max() < 2e-2


def test_tokens_equal_the_package_with_35_tokens_and_cls_first(reward: ImageReward) -> None:
    seen: list[Tensor] = []
    handle = reward.text_tower.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    reward(torch.zeros(len(PROMPTS), 3, 32, 32), PROMPTS)
    handle.remove()
    assert seen[0].tolist() == ORACLE["tokens"]
    assert seen[0].shape[1] == 35 and bool((seen[0][:, 0] == reward.tokenizer.cls_token_id).all())
    size = len(reward.tokenizer)
    assert reward.tokenizer.convert_tokens_to_ids(["[DEC]", "[ENC]"]) == [size - 2, size - 1]


def test_24_images_of_a_prompt_take_24_image_and_24_joint_rows_and_one_tokenisation(
    pretrained: str, tokenizer: str, rows_of: Callable[[nn.Module], list[int]]
) -> None:
    reward = ImageReward(pretrained, tokenizer)
    image_rows, joint_rows = rows_of(reward.image_tower), rows_of(reward.text_tower)
    tokenise, texts = reward.tokenizer, []

    def counted(prompts: list[str], **options: Any) -> Any:
        texts.append(prompts)
        return tokenise(prompts, **options)

    reward.tokenizer = counted  # type: ignore[assignment]
    images = torch.stack([PICTURES[number % 2] for number in range(24)])
    scores = reward(images, [PROMPTS[0]] * 24)
    assert image_rows == [24] and joint_rows == [24] and texts == [[PROMPTS[0]]]
    torch.testing.assert_close(scores, SCORES[0, :2].repeat(12), rtol=0, atol=1e-4)


def test_scores_do_not_depend_on_the_batch_size(
    pretrained: str, tokenizer: str, rows_of: Callable[[nn.Module], list[int]]
) -> None:
    reward = ImageReward(pretrained, tokenizer, batch=3)
    image_rows, joint_rows = rows_of(reward.image_tower), rows_of(reward.text_tower)
    scores = reward(torch.stack([PICTURES[0]] * len(PROMPTS)), PROMPTS)
    assert image_rows == joint_rows == [3, 3, 1]
    torch.testing.assert_close(scores, SCORES[:, 0], rtol=0, atol=1e-4)


def test_batch_of_one_is_scored(reward: ImageReward) -> None:
    torch.testing.assert_close(reward(PICTURES[1][None], PROMPTS[2:3]), SCORES[2:3, 1], rtol=0, atol=1e-4)


def test_each_weight_of_the_file_is_renamed_or_unused(reward: ImageReward) -> None:
    weights = load_file(RECORDED / "weights.safetensors")
    patterns = [*imagereward._RENAMED, *imagereward._UNUSED]
    assert {name: sum(bool(re.fullmatch(pattern, name)) for pattern in patterns) for name in weights} == dict.fromkeys(
        weights, 1
    )
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

    config = ImageReward(release(tmp_path, shrink), tokenizer).image_tower.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (1, 128, 2)
    assert (config.image_size, config.patch_size, config.intermediate_size) == (112, 16, 128)


def test_model_is_frozen_with_towers_in_the_requested_dtype_and_the_head_in_float32(
    pretrained: str, tokenizer: str
) -> None:
    reward = ImageReward(pretrained, tokenizer, dtype="bfloat16")
    towers = [*reward.image_tower.parameters(), *reward.text_tower.parameters()]
    assert {weight.dtype for weight in towers} == {torch.bfloat16}
    assert {weight.dtype for weight in reward.head.parameters()} == {torch.float32}
    assert not any(weight.requires_grad for weight in [*towers, *reward.head.parameters()])
    assert not any(part.training for part in (reward.image_tower, reward.text_tower, reward.head))
    scores = reward(torch.stack(PICTURES[:2]), [PROMPTS[0]] * 2)
    assert scores.dtype == torch.float32
    assert (scores - SCORES[0, :2]).abs().max() < 0.3  # the recorded weights amplify rounding


def test_configuration_builds_the_reward(pretrained: str, tokenizer: str) -> None:
    file = Path(__file__).parents[2] / "conf" / "reward" / "imagereward.yaml"
    assert file.read_text().startswith("# @package reward\n")
    config = OmegaConf.load(file)["imagereward"]
    assert config.pop("weight") == 1.0
    reward = instantiate(config, pretrained=pretrained, tokenizer=tokenizer, device="cpu")
    assert isinstance(reward, ImageReward) and reward.dtype == torch.float32


def test_preprocessing_crops_the_middle_of_the_longer_side() -> None:
    images = torch.zeros(1, 3, 8, 16)
    images[..., 4:12] = 1
    assert preprocess(images, 8).min() > 1 and preprocess(images.mT, 8).min() > 1  # all white, normalised


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("mlp.layers.4.bias"), "lacks 1 tensors, such as head.4.bias"),
        (lambda w: w.pop("blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"), "lacks 1 tensors"),
        (lambda w: w.pop("blip.visual_encoder.patch_embed.proj.weight"), "lacks 1 tensors.*patch_embedding.weight"),
        (lambda w: w.update({"blip.temp": torch.zeros(())}), "has unexpectedly 1 tensors, such as blip.temp"),
        (lambda w: w.update({"mlp.layers.5.weight": torch.zeros(2)}), "unexpectedly 1 tensors, such as head.5.weight"),
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
        ImageReward(release(tmp_path, change), tokenizer)


@pytest.mark.parametrize("file", ["ImageReward.pt", "med_config.json"])
def test_error_about_a_missing_file_has_the_download_command(file: str, tokenizer: str, tmp_path: Path) -> None:
    folder = release(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(UserError, match=f"it holds no {file}. `hf download zai-org/ImageReward --local-dir <folder>`"):
        ImageReward(folder, tokenizer)


@pytest.mark.parametrize("kept", [0, 100, 200_000])
def test_error_about_a_damaged_file_names_it(kept: int, tokenizer: str, tmp_path: Path) -> None:
    file = Path(release(tmp_path)) / "ImageReward.pt"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(
        UserError, match="ImageReward.pt .* is invalid: it cannot be read as weights: .* download it again"
    ):
        ImageReward(str(tmp_path), tokenizer)


def test_file_without_tensors_by_name_is_an_error(tokenizer: str, tmp_path: Path) -> None:
    torch.save(torch.zeros(3), Path(release(tmp_path)) / "ImageReward.pt")
    with pytest.raises(UserError, match="must hold tensors by name .*; found: Tensor"):
        ImageReward(str(tmp_path), tokenizer)


@pytest.mark.parametrize(
    ("content", "stopped_at"), [("{", "Expecting"), ("[]", "list"), ('{"vocab_size": 4}', "'hidden_size'")]
)
def test_invalid_text_configuration_is_an_error(content: str, stopped_at: str, tokenizer: str, tmp_path: Path) -> None:
    (Path(release(tmp_path)) / "med_config.json").write_text(content)
    with pytest.raises(UserError, match=f"med_config.json .* must be JSON with .* stopped at {stopped_at}"):
        ImageReward(str(tmp_path), tokenizer)


def test_tokenizer_saved_by_transformers_gives_the_same_tokens(
    tokenizer: str, reward: ImageReward, tmp_path: Path
) -> None:
    BertTokenizer.from_pretrained(tokenizer).save_pretrained(tmp_path)
    assert not (tmp_path / "vocab.txt").exists()
    loaded = load_tokenizer(str(tmp_path), len(reward.tokenizer))
    assert loaded(PROMPTS).input_ids == reward.tokenizer(PROMPTS).input_ids


def test_tokenizer_of_another_size_is_an_error(pretrained: str, tmp_path: Path) -> None:
    words = (RECORDED / "vocab.txt").read_text(encoding="utf-8").splitlines()
    (tmp_path / "vocab.txt").write_text("\n".join(words[:-1]) + "\n", encoding="utf-8")
    message = f"tokenizer=.* is invalid: the model has {len(words) + 2} tokens, and this tokenizer has {len(words) + 1}"
    with pytest.raises(UserError, match=message):
        ImageReward(pretrained, str(tmp_path))


def test_error_about_a_damaged_tokenizer_names_it(pretrained: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer=.* is invalid: it cannot be read: .* Delete .*tokenizer.json"):
        ImageReward(pretrained, str(tmp_path))


@pytest.mark.parametrize("name", ["zai-org/ImageReward", "no such/name/at all"])
def test_error_without_the_hub_has_the_download_command(name: str, tokenizer: str, offline: Path) -> None:
    with pytest.raises(UserError, match=f"pretrained={name} is neither .* `hf download zai-org"):
        ImageReward(name, tokenizer)


def test_error_about_a_missing_tokenizer_has_the_download_command(pretrained: str, offline: Path) -> None:
    with pytest.raises(UserError, match="tokenizer=google-bert/.* is neither .* `hf download google"):
        ImageReward(pretrained, "google-bert/bert-base-uncased")
    with pytest.raises(UserError, match="tokenizer=./nowhere is invalid: .* holds no vocab.txt or tokenizer.json"):
        ImageReward(pretrained, "./nowhere")
