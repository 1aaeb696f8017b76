"""Comparison of base and checkpoint on the same prompts and noise, with errors over prompts."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint
from PIL import Image

from solrl_lightning.artifacts.pictures import Row, draw_grid
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.options.run import Run
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.seeds import evaluation_seeds
from solrl_lightning.tasks.evaluate import (
    Scored,
    compare_models,
    draw,
    evaluate,
    in_order,
    over_prompts,
    to_csv,
    win_rate,
)
from solrl_lightning.tasks.train import train
from solrl_lightning.training.evaluation import Evaluation

Compose = Callable[..., Run]

SMALL = ("experiment=smoke", "trainer=cpu", "model.eval_steps=2")


def test_adapter_of_zeros_makes_no_difference(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(compose(*SMALL), tmp_path / "start.ckpt", trained=0, average=0)
    result = evaluate(compose(*SMALL, "task=evaluate", f"ckpt='{checkpoint}'"))
    shapes = result["rewards"]["shapes"]
    assert shapes["trained"] == shapes["base"]
    assert shapes["difference"] == {"mean": 0, "std": 0, "standard_error": 0, "low": 0, "high": 0}
    assert shapes["win_rate"] == 0.5
    assert (result["prompts"], result["images_per_prompt"], len(result["per_prompt"])) == (4, 2, 4)
    assert json.loads((tmp_path / "evaluate.json").read_text()) == result
    assert "trained" in capfd.readouterr().out
    with Image.open(tmp_path / "evaluate.png") as picture:
        pixels = torch.tensor(np.array(picture))
    # Two columns of 128 pixels and a gap of 4 per model, 20 between the models, the first row below title and caption.
    left = pixels[84 : 84 + 128, 10 : 10 + 260]
    right = pixels[84 : 84 + 128, 10 + 260 + 20 : 10 + 2 * 260 + 20]
    assert left.float().std() > 1
    assert torch.equal(left, right)


def test_evaluation_equals_that_of_the_training_run(compose: Compose, tmp_path: Path) -> None:
    train(compose(*SMALL, "iterations=1", "optimizer.lr=0.01", "callbacks.sample_grid.every=0"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    result = evaluate(compose(*SMALL, "task=evaluate", f"ckpt='{tmp_path / 'checkpoints' / 'last.ckpt'}'"))
    shapes = result["rewards"]["shapes"]
    assert shapes["base"]["mean"] == pytest.approx(summary["base_reward"], rel=1e-6)
    assert shapes["trained"]["mean"] == pytest.approx(summary["final_reward"], rel=1e-6)
    assert shapes["trained"]["mean"] != shapes["base"]["mean"]
    less = "+reward.less={_target_: solrl_lightning.rewards.shapes.ShapesReward, weight: -0.5}"
    of_lora = evaluate(compose(*SMALL, "task=evaluate", f"model.init_lora='{tmp_path / 'lora'}'", less))
    assert {name: of_lora["rewards"][name] for name in result["rewards"]} == result["rewards"]
    assert of_lora["rewards"]["less"]["win_rate"] == 1 - shapes["win_rate"]  # the lower score wins
    assert shapes["difference"]["mean"] == pytest.approx(summary["improvement"], rel=1e-5)
    gains = [row["shapes"]["trained"] - row["shapes"]["base"] for row in result["per_prompt"]]
    assert shapes["difference"]["mean"] == pytest.approx(sum(gains) / len(gains), rel=1e-6)
    with (tmp_path / "evaluate.csv").open(newline="") as file:
        images = list(csv.DictReader(file))
    assert len(images) == 4 * 2 and len({image["seed"] for image in images}) == 8
    won = [float(image["shapes trained"]) > float(image["shapes base"]) for image in images]
    assert shapes["win_rate"] == pytest.approx(sum(won) / 8, abs=1 / 16)  # at most one tie
    prompts = [row["prompt"] for row in result["per_prompt"]]
    assert [image["prompt"] for image in images] == [prompt for prompt in prompts for _ in range(2)]


def test_only_the_base_is_scored_without_a_checkpoint_by_each_reward_and_their_weighted_sum(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other, watched = (
        f"+reward.{name}={{_target_: solrl_lightning.rewards.shapes.ShapesReward, weight: {weight}}}"
        for name, weight in (("other", 0.5), ("watched", 0))
    )
    arguments = ("task=evaluate", "data.eval_prompts=1", "task.grid_images=1", other, watched)
    result = evaluate(compose(*SMALL, *arguments))
    assert all(set(values) == {"base"} for values in result["rewards"].values())
    assert result["rewards"]["shapes"]["base"]["standard_error"] is None  # one prompt
    means = {name: values["base"]["mean"] for name, values in result["rewards"].items()}
    assert list(means) == ["shapes", "other", "watched", "weighted_sum"]
    assert means["shapes"] == result["per_prompt"][0]["shapes"]["base"]
    assert means["other"] == means["watched"] == means["shapes"]
    assert means["weighted_sum"] == pytest.approx(1.5 * means["shapes"], rel=1e-6)
    assert (tmp_path / "evaluate.png").is_file()
    assert "ckpt=last" in capfd.readouterr().out


def test_table_and_picture_have_each_score_under_its_reward_and_model() -> None:
    scores = torch.arange(12.0).view(2, 1, 2, 3)  # base and trained, a prompt, two images, three scores
    rewards = WeightedRewards(dict.fromkeys(["shapes", "other"], ShapesReward()), {"shapes": 1.0, "other": 1.0})
    evaluation = Evaluation([Prompt("a star")], rewards, "euler", steps=1, images=2, seed=3)
    sums = ["weighted_sum base", "weighted_sum trained"]
    header, *lines = csv.reader(to_csv(evaluation, ["base", "trained"], scores).splitlines())
    assert header == ["prompt", "seed", "shapes base", "shapes trained", "other base", "other trained", *sums]
    seeds = evaluation_seeds(3, ["a star"], 2)[0].tolist()
    assert lines == [
        ["a star", str(seeds[0]), "0.0", "6.0", "1.0", "7.0", "2.0", "8.0"],
        ["a star", str(seeds[1]), "3.0", "9.0", "4.0", "10.0", "5.0", "11.0"],
    ]
    pictures = torch.randint(256, (2, 1, 3, 8, 8), dtype=torch.uint8)  # the first image of each model
    picture = draw(evaluation, ["base", "trained"], [Scored(scores[:, 0], pictures)])
    row = Row("a star", list(pictures.float() / 255), ["2.00", "8.00"])
    expected = draw_grid("Same held-out prompts, same noise; weighted_sum below", ["base", "trained"], [row])
    assert picture.tobytes() == expected.tobytes()


def test_results_of_ranks_are_merged_in_the_order_of_prompts() -> None:
    whole = [Scored(torch.tensor([row]), None) for row in range(5)]
    assert in_order([whole[::2], whole[1::2]]) == whole
    assert in_order([whole[:1], [], []]) == whole[:1]


def test_errors_are_over_prompts_not_over_images() -> None:
    rewards = torch.tensor([[0.0, 0.2], [0.3, 0.5], [0.6, 0.8]], dtype=torch.float64)
    mean = over_prompts(rewards)  # of 0.1, 0.4 and 0.7
    assert mean.mean == pytest.approx(0.4)
    assert mean.standard_error == pytest.approx(0.3 / math.sqrt(3))


def test_tie_is_half_a_win() -> None:
    ours, theirs = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 2.0], [4.0, 5.0]])
    assert win_rate(ours, theirs) == pytest.approx(1.5 / 4)


def test_pair_without_both_scores_is_left_out() -> None:
    base = torch.tensor([[0.0, math.nan], [1.0, 3.0], [math.nan, math.nan]], dtype=torch.float64)
    trained = torch.tensor([[0.5, 9.0], [3.0, math.nan], [1.0, 1.0]], dtype=torch.float64)
    compared = compare_models(["base", "trained"], torch.stack([base, trained]))
    assert (compared["win_rate"], compared["difference"]["mean"]) == (1.0, pytest.approx((0.5 + 2.0) / 2))
    assert compared["base"]["mean"] == pytest.approx((0.0 + 1.0) / 2)
    assert compared["trained"]["mean"] == pytest.approx((0.5 + 3.0) / 2)
    assert compare_models(["base", "trained"], torch.stack([base, trained]), -1)["win_rate"] == 0.0
