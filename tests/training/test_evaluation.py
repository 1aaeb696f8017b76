"""What an evaluation says of itself before its results."""

import logging
import math

import pytest
import torch

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import NonFiniteError
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.training import evaluation
from solrl_lightning.training.evaluation import Estimate, Evaluation, evaluation_errors


def test_an_estimate_is_logged_once_and_leaves_out_the_batch_that_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    estimate, clock = Estimate(), iter([0.0, 300.0, 305.0, 312.0, 320.0, 330.0])
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: next(clock))
    with caplog.at_level(logging.INFO):
        for done in (0, 24, 48, 72, 96, 480):
            estimate(lambda done, total: None, done, 480)
    assert caplog.messages == ["an evaluation takes about 2 minutes here"]  # 12 s for 48 of 480 images


def test_short_evaluations_one_after_the_other_are_not_one_long_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    estimate, clock = Estimate(), iter([0.0, 2.0, 60.0, 62.0])
    monkeypatch.setattr("solrl_lightning.training.evaluation.time.perf_counter", lambda: next(clock))
    with caplog.at_level("INFO"):
        for done in (32, 64, 32, 64):
            estimate(lambda done, total: None, done, 64)
    assert not caplog.messages


def test_evaluations_with_other_noise_measure_the_same_and_do_not_compare() -> None:
    rewards = WeightedRewards({"shapes": ShapesReward()}, {"shapes": 1.0})
    one, other, longer = (
        Evaluation([Prompt("a red circle", {"count": 1})], rewards, "euler", steps, 2, seed)
        for steps, seed in ((4, 7), (4, 8), (5, 7))
    )
    assert one.digest == other.digest != longer.digest
    assert len({each.digest_with_noise for each in (one, other, longer)}) == 3
    assert Evaluation([Prompt("a red circle", {"count": 2})], rewards, "euler", 4, 2, 7).digest != one.digest


def test_prompt_without_a_score_is_left_out_of_means_and_paired_differences() -> None:
    rewards = WeightedRewards({"shapes": ShapesReward()}, {"shapes": 1.0})
    measured = Evaluation([Prompt(name) for name in "abcd"], rewards, "euler", 4, 2, 7)
    nan = math.nan
    table = torch.zeros(4, len(measured.columns), dtype=torch.float64)
    table[:, 0] = torch.tensor([0.1, nan, 0.3, 0.8])
    measured.table = table
    assert measured.means()["shapes"] == pytest.approx(0.4)
    base = torch.tensor([[0.0], [0.5], [nan], [0.5]], dtype=torch.float64)
    errors = evaluation_errors(["shapes"], table[:, :1], base)
    assert errors["change_error"]["shapes"] == pytest.approx(0.1)  # of 0.1 and 0.3
    table[:, 0] = nan
    with pytest.raises(NonFiniteError, match="no held-out image has a finite shapes reward"):
        measured.means()
