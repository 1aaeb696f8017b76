"""What an evaluation says of itself before its results."""

import logging

import pytest

from solrl_lightning.training import evaluation
from solrl_lightning.training.evaluation import Estimate


def test_an_estimate_is_logged_once_and_leaves_out_the_batch_that_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    estimate, clock = Estimate(), iter([0.0, 300.0, 305.0, 312.0, 320.0, 330.0])
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: next(clock))
    with caplog.at_level(logging.INFO):
        for done in (0, 24, 48, 72, 96, 480):
            estimate(lambda done, total: None, done, 480)
    assert caplog.messages == ["an evaluation takes about 2 minutes here"]  # 12 s for 48 of 480 images
