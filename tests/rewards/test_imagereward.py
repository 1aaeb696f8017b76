"""Compares ImageReward with the published package, and tests the use of every weight of its file.

``oracle/recorded`` holds a small model of the package's classes and its scores, written by dev/oracle/record.py.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawings import as_tensor, shipped
from PIL import Image
from torch import Tensor, nn

from solrl_lightning.rewards.imagereward import ImageReward

RECORDED = Path(__file__).parent / "oracle" / "recorded"
ORACLE = json.loads((RECORDED / "scores.json").read_text())
PROMPTS: list[str] = ORACLE["prompts"]
SCORES = torch.tensor(ORACLE["scores"])  # [prompts, pictures]
PICTURES = [as_tensor(Image.open(RECORDED / f"{number}.png")) for number in range(SCORES.shape[1])]


@pytest.fixture(scope="module")
def reward(release: str, bert: str) -> ImageReward:
    return shipped("imagereward", pretrained=release, tokenizer=bert)


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
    release: str, bert: str, rows_of: Callable[[nn.Module], list[int]]
) -> None:
    reward = ImageReward(release, bert, batch=10)
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


def test_file_determines_the_size_of_the_image_tower(release: str, bert: str, tmp_path: Path) -> None:
    weights = torch.load(Path(shutil.copytree(release, tmp_path / "small")) / "ImageReward.pt", weights_only=True)
    weights = {name: weight for name, weight in weights.items() if ".blocks.1." not in name}
    weights["blip.visual_encoder.pos_embed"] = weights["blip.visual_encoder.pos_embed"][:, :50]  # 7 x 7 patches
    torch.save(weights, tmp_path / "small" / "ImageReward.pt")
    config = ImageReward(str(tmp_path / "small"), bert).image_tower.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (1, 128, 2)
    assert (config.image_size, config.patch_size, config.intermediate_size) == (112, 16, 128)


def test_model_is_frozen_with_towers_in_the_requested_dtype_and_the_head_in_float32(release: str, bert: str) -> None:
    reward = ImageReward(release, bert, dtype="bfloat16")
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
