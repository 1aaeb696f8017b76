"""The overhead of an iteration outside the models."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nano import save_nano
from overhead import format_overhead, overhead

from solrl_lightning.options.run import Run
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.rewards.shapes import ShapesReward

SMALL = (
    "task=benchmark",
    "experiment=smoke",
    "trainer=cpu",
    "task.repeats=1",
    "model.full_steps=2",
    "model.preview_steps=1",
)


def test_time_is_assigned_to_models_and_the_rest_is_overhead(
    compose: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def slower(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return function(*args, **kwargs)

        return slow

    monkeypatch.setattr(ShapesReward, "unchecked", slower(ShapesReward.unchecked, 0.08))
    monkeypatch.setattr(Flux1, "noise", slower(Flux1.noise, 0.12))
    result = overhead(compose(*SMALL, f"model.pretrained={save_nano(tmp_path)}"), torch.device("cpu"))
    stages = result["stages"]
    # Two prompts of eight candidates explore in one chunk of 16, and four of each regenerate in one of 8.
    for stage in ("explore", "regenerate"):
        assert stages[stage]["reward"] >= 0.08
        assert stages[stage]["outside"] >= 0.12
    for times in stages.values():
        assert sum(times.values()) == pytest.approx(2 * times["total"])
    models = {stage: {name for name, seconds in times.items() if seconds > 0} for stage, times in stages.items()}
    sampling = {"transformer", "decode", "reward"}
    assert models["requantize"] == {"total", "outside"}
    assert models["explore"] == {"total", "outside"} | sampling  # iteration 1 has encoded the prompts
    assert models["regenerate"] == {"total", "outside"} | sampling
    assert models["train"] == {"total", "outside", "transformer", "backward", "optimizer"}
    outside = sum(times["outside"] for times in stages.values())
    assert result["outside_share"] == pytest.approx(outside / result["iteration"])
    assert "spent outside the models" in format_overhead(result)
