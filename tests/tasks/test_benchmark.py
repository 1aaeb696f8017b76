"""The benchmark: what is timed, and which part of an iteration is the models' own computation."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from solrl_lightning.errors import UserError
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.tasks import benchmark as benchmark_module
from solrl_lightning.tasks.benchmark import benchmark, overhead, with_speedups

Compose = Callable[..., DictConfig]

SMALL = (
    "task=benchmark",
    "experiment=smoke",
    "trainer=cpu",
    "task.repeats=1",
    "task.compile=false",
    "model.full_steps=2",
    "model.preview_steps=1",
)
SIZES = ("task.sizes.pool=8", "task.sizes.keep=4")


def test_families_and_forward_passes_are_timed_side_by_side(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_module, "_FORWARDS", 2)
    result = benchmark(compose(*SMALL, *SIZES, "task.families=[naive_scaling,sol_rl]"))
    forward, families = result["forward"], result["families"]
    assert list(forward["seconds"]) == ["bf16 eager", "shadow eager"]
    assert forward["ratios"]["bf16 eager"] == 1
    assert forward["ratios"]["shadow eager"] == forward["seconds"]["shadow eager"] / forward["seconds"]["bf16 eager"]
    assert list(families) == ["naive_scaling", "sol_rl"]
    for times in families.values():
        assert (times["pool"], times["keep"]) == (8, 4)
        assert times["rollout"] == pytest.approx(times["requantize"] + times["explore"] + times["regenerate"])
        assert times["rollout"] + times["train"] <= times["iteration"]
        assert times["regenerate"] > 0 and times["train"] > 0
    assert families["naive_scaling"]["explore"] == 0 < families["sol_rl"]["explore"]
    assert families["naive_scaling"]["speedup"] == {"naive_scaling": 1}
    assert json.loads((tmp_path / "benchmark.json").read_text()) == result
    out = capfd.readouterr().out
    assert "naive_scaling" in out and "spent outside the models" in out


def test_time_is_charged_to_the_model_that_takes_it_and_the_rest_is_outside(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return function(*args, **kwargs)

        return slow

    monkeypatch.setattr(ShapesReward, "__call__", slower(ShapesReward.__call__, 0.2))
    monkeypatch.setattr(Flux1, "noise", slower(Flux1.noise, 0.3))
    result = overhead(compose(*SMALL), torch.device("cpu"))
    stages = result["stages"]
    # Two prompts of eight candidates explore in one chunk of 16, and four of each regenerate in one of 8.
    for stage in ("explore", "regenerate"):
        assert stages[stage]["reward"] >= 0.2
        assert stages[stage]["outside"] >= 0.3
    for times in stages.values():
        assert sum(times.values()) == pytest.approx(2 * times["total"])
    models = {stage: {name for name, seconds in times.items() if seconds > 0} for stage, times in stages.items()}
    sampling = {"transformer", "decode", "reward"}
    assert models["requantize"] == {"total", "outside"}
    assert models["explore"] == {"total", "outside", "encode"} | sampling
    assert models["regenerate"] == {"total", "outside"} | sampling
    assert models["train"] == {"total", "outside", "transformer", "backward", "optimizer"}
    outside = sum(times["outside"] for times in stages.values())
    assert result["outside_share"] == pytest.approx(outside / result["iteration"])


def test_speedups_are_over_the_baselines_that_were_run() -> None:
    families = {"naive_scaling": {"rollout": 6.0}, "sol_rl": {"rollout": 1.5}}
    assert with_speedups(families)["sol_rl"]["speedup"] == {"naive_scaling": 4.0}


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("task.families=[sol_rl,sole_rl]", "no family named 'sole_rl' .* sol_rl"),
        ("task.sizes.keep=100", "family.keep must be at most family.pool"),
    ],
)
def test_mistakes_are_told_before_anything_is_timed(compose: Compose, mistake: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        benchmark(compose(*SMALL, "model.pretrained=nowhere/at-all", mistake))
