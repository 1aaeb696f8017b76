"""Videos: which frames the rewards score, and what pictures show of them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from nano import MAX_WORDS, PROMPTS, prompts_of, save_nano
from PIL import Image
from torch import Tensor

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import NonFiniteError
from solrl_lightning.frames import choose_frames, filmstrip
from solrl_lightning.metrics.images import describe
from solrl_lightning.options.run import Run
from solrl_lightning.rewards.base import Metadata, Reward
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.tasks.evaluate import evaluate
from solrl_lightning.tasks.generate import generate
from solrl_lightning.tasks.train import train
from solrl_lightning.training.evaluation import Evaluation

Compose = Callable[..., Run]
VIDEOS = (torch.arange(18.0).view(2, 9, 1, 1, 1) / 20).expand(2, 9, 3, 8, 6)  # frame i of video b is (9 b + i) / 20


def chosen(which: str | int) -> list[list[int]]:
    frames = choose_frames(VIDEOS, which)
    assert frames.shape[2:] == (3, 8, 6)
    return [[round(20 * value) for value in row] for row in frames[:, :, 0, 0, 0].tolist()]


def test_chosen_frames_are_at_equal_distances() -> None:
    assert chosen("first") == chosen(1) == [[0], [9]] and chosen("middle") == [[4], [13]]
    assert chosen("all") == chosen(9) == [[*range(9)], [*range(9, 18)]]
    assert chosen(2) == [[0, 8], [9, 17]] and chosen(3) == [[0, 4, 8], [9, 13, 17]] and chosen(4)[0] == [0, 3, 5, 8]


def test_filmstrip_has_four_frames_side_by_side() -> None:
    strips = filmstrip(VIDEOS)
    assert strips.shape == (2, 3, 8, 4 * 6)
    assert (20 * strips[0, 0, 0]).round().tolist() == [frame for frame in (0, 3, 5, 8) for _ in range(6)]
    assert filmstrip(VIDEOS[:, :1]).shape == (2, 3, 8, 6)
    assert torch.equal(filmstrip(VIDEOS[:, 0]), VIDEOS[:, 0])


class Red(Reward):
    """The red of an image times the prompt's "factor"."""

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        return images[:, 0].mean((1, 2)) * torch.tensor([row["factor"] for row in metadata])


@pytest.mark.parametrize(("frames", "means"), [("first", (0, 9)), (2, (4, 13)), ("all", (4, 13)), (None, (4, 13))])
def test_score_of_a_video_is_the_mean_of_its_frames(frames: str | int | None, means: tuple[int, int]) -> None:
    prompts = [Prompt("a pet", {"factor": 1.0}), Prompt("a pet", {"factor": 10.0})]
    rewards = WeightedRewards({"a": Red(), "b": Red()}, {"a": 1.0, "b": 0.0}, frames=frames)
    expected = torch.tensor([means[0] / 20, means[1] / 2])
    scores = rewards(VIDEOS, prompts)
    torch.testing.assert_close(scores, expected[:, None].expand(2, 2))
    torch.testing.assert_close(rewards.for_training(VIDEOS, prompts), expected[:, None])


def test_error_of_a_frame_names_its_video() -> None:
    broken = VIDEOS.clone()
    broken[1, 3] = torch.nan
    rewards = WeightedRewards({"a": Red()}, {"a": 1.0})
    with pytest.raises(NonFiniteError, match=PROMPTS[1]) as error:
        rewards(broken, [Prompt(text, {"factor": 1.0}) for text in PROMPTS[:2]])
    assert error.value.row == 1


def test_statistics_of_a_video_are_the_means_of_its_frames() -> None:
    videos = torch.rand(2, 5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([describe(video).mean(0) for video in videos])
    torch.testing.assert_close(describe(videos), expected)


def test_evaluations_of_other_frames_do_not_compare() -> None:
    digests = {
        Evaluation(prompts_of(PROMPTS), WeightedRewards({}, {}, frames=frames), "euler", 2, 2, 0).digest
        for frames in (None, "all", 2, 4)
    }
    assert len(digests) == 4


def test_pictures_of_videos_are_filmstrips(compose: Compose, tmp_path: Path) -> None:
    small = (
        f"model=wan model.pretrained={save_nano(tmp_path / 'wan', 'wan')} model.embeddings=null model.resolution=32 "
        f"model.num_frames=5 model.frames=middle model.max_sequence_length={MAX_WORDS} model.full_steps=2 "
        "model.eval_steps=1 family=diffusionnft family.pool=2 family.keep=2 experiment=smoke reward=shapes data=shapes "
        "trainer=cpu ~logger data.eval_prompts=1 data.eval_images=1 iterations=1"
    ).split()
    train(compose(*small, "callbacks.sample_grid.every=1", "callbacks.sample_grid.seeds_per_prompt=1"))
    options = "task.prompts=[a red circle]", "task.seeds=[3]"
    (made,) = generate(compose(*small, "task=generate", *options))["images"]
    file = tmp_path / made["file"]
    with Image.open(file) as strip, Image.open(file.with_suffix(".webp")) as video:
        assert strip.size == (4 * 32, 32) and video.size == (32, 32) and video.n_frames == 5  # type: ignore[attr-defined]
    result = evaluate(compose(*small, "task=evaluate", "task.grid_images=1"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert result["rewards"]["shapes"]["base"]["mean"] == pytest.approx(summary["base_reward"], rel=1e-6)
    for name in ("evaluate.png", "generate.png", "samples/grid_000001.png", "samples/pool_000001.png"):
        with Image.open(tmp_path / name) as picture:
            cells = torch.tensor(np.array(picture))[84:, 10 : 10 + 512]  # below the texts: strips of 512 x 128 pixels
            assert picture.width >= 532 and cells[:128].float().std() > 1, name
