"""Compares HPSv2 with open_clip's own pipeline on PIL images, and tests the errors about checkpoint files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import torchvision.transforms.functional as vision
from drawings import FOUR, LONG, PROMPTS, all_pairs, as_picture, padded, shipped
from open_clip.transform import image_transform
from PIL import Image
from take_away import take_each_file_away
from torch import Tensor

from solrl_lightning.errors import UserError
from solrl_lightning.rewards import HPSv2


@pytest.fixture(scope="module")
def reward(hps_file: str, open_clip_architecture: str) -> HPSv2:
    return shipped("hpsv2", pretrained=hps_file, architecture=open_clip_architecture)


def published_transform(picture: Image.Image) -> Tensor:
    return vision.normalize(padded(picture), open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)


@pytest.fixture(scope="module")
def published(hps_file: str, open_clip_architecture: str) -> Callable[..., Tensor]:
    """published(pictures, prompts, transform) returns scores [B, U] computed as in HPSv2's script, with open_clip."""
    model: Any = open_clip.create_model(open_clip_architecture, pretrained=hps_file).eval()
    tokenize = open_clip.get_tokenizer(open_clip_architecture)

    @torch.no_grad()
    def scores(pictures: list[Image.Image], prompts: list[str], transform: Any = published_transform) -> Tensor:
        images = model.encode_image(torch.stack([transform(picture) for picture in pictures]), normalize=True)
        return images @ model.encode_text(tokenize(prompts), normalize=True).T

    return scores


def test_scores_equal_the_published_pipeline_on_pil_images(
    reward: HPSv2, published: Callable[..., Tensor], pictures: list[Image.Image]
) -> None:
    scores, reference = all_pairs(reward, pictures), published(pictures, PROMPTS)
    assert scores.dtype == torch.float32
    assert reference.std(0).max() > 0.05  # a difference between images would show
    torch.testing.assert_close(scores, reference, rtol=0, atol=1e-5)
    in_pil = image_transform(224, is_train=False, resize_mode="longest", interpolation="bicubic", fill_color=0)
    torch.testing.assert_close(scores, published(pictures, PROMPTS, in_pil), rtol=0, atol=1e-2)


def test_text_is_cut_at_77_tokens_with_the_end_token_kept(
    reward: HPSv2, published: Callable[..., Tensor], images: Tensor
) -> None:
    prompts = [LONG, LONG + " and a triangle that nobody reads"]
    reference = published([as_picture(image) for image in images[:2]], prompts).diagonal()
    torch.testing.assert_close(reward(images[:2], prompts), reference, rtol=0, atol=1e-5)
    torch.testing.assert_close(reward(images[:1], prompts[:1]), reward(images[:1], prompts[1:]), rtol=0, atol=1e-6)


def test_float16_weights_on_disk_are_cast_to_the_requested_dtype_and_frozen(
    reward: HPSv2, hps_file: str, open_clip_architecture: str, images: Tensor
) -> None:
    low = HPSv2(hps_file, open_clip_architecture, dtype="bfloat16")
    for each, dtype in ((reward, torch.float32), (low, torch.bfloat16)):
        kinds = {(parameter.dtype, parameter.requires_grad) for parameter in each.model.parameters()}
        assert kinds == {(dtype, False)} and not any(module.training for module in each.model.modules())
    scores = low(images, FOUR)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, reward(images, FOUR), rtol=0, atol=2e-2)


def test_published_file_is_read_from_a_folder_or_the_hub(
    reward: HPSv2, hps_file: str, open_clip_architecture: str, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *names: requests.append(names) or hps_file)
    for name in (str(Path(hps_file).parent), "xswu/HPSv2"):
        assert torch.equal(HPSv2(name, open_clip_architecture)(images, FOUR), reward(images, FOUR))
    assert requests == [("xswu/HPSv2", "HPS_v2.1_compressed.pt")]


@pytest.mark.parametrize("name", ["./missing", "missing.pt", "{tmp}"])
def test_error_about_a_missing_file_names_it(name: str, open_clip_architecture: str, tmp_path: Path) -> None:
    name = name.format(tmp=tmp_path)
    message = f"reward.hpsv2.pretrained={name} is invalid: .* it holds no (HPS_v2.1_compressed.pt). .* of a local \\1"
    with pytest.raises(UserError, match=message):
        HPSv2(name, open_clip_architecture)


def edited(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """A change of the weights in a checkpoint file."""

    def damage(file: Path) -> None:
        checkpoint = torch.load(file, weights_only=True)
        change(checkpoint["state_dict"])
        torch.save(checkpoint, file)

    return damage


UNREADABLE = "it cannot be read as weights: .* download it again"
LAYOUT = "must hold tensors by name or under the key state_dict"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: torch.save({"state_dict": {"run": print}}, file), UNREADABLE),  # code
        (lambda file: torch.save([torch.ones(1)], file), LAYOUT),
        (lambda file: torch.save({"state_dict": {"logit_scale": 4.6}}, file), LAYOUT),
        (edited(lambda w: w.pop("visual.proj")), "lacks 1 tensors, such as visual.proj"),
        (edited(lambda w: w.update(score_head=torch.ones(1))), "has unexpectedly 1 tensors, such as score_head"),
        (
            edited(lambda w: w.update({"visual.positional_embedding": torch.zeros(37, 32)})),  # which is not resized
            r"visual.positional_embedding with \[37, 32\] for \[50, 32\]",
        ),
    ],
)
def test_error_about_an_unfit_file(
    hps_file: str, open_clip_architecture: str, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    file = Path(shutil.copy(hps_file, tmp_path))
    damage(file)
    with pytest.raises(UserError, match=f"reward.hpsv2.pretrained={file} is invalid: .*{message}"):
        HPSv2(str(file), open_clip_architecture)


def test_a_file_that_is_missing_is_named(hps_file: str, open_clip_architecture: str, images: Tensor) -> None:
    folder = Path(hps_file).parent
    needed = take_each_file_away(folder, lambda: [HPSv2(str(folder), open_clip_architecture)(images, FOUR)])
    assert needed == {"HPS_v2.1_compressed.pt": True}
