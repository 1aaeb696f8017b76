"""The comparison of runs, on hand-written summaries whose table is known."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from omegaconf import DictConfig
from PIL import Image

from solrl_lightning.errors import UserError
from solrl_lightning.run_folder import read_runs
from solrl_lightning.tasks.compare import Group, compare, draw_curves, learning_curve

Compose = Callable[..., DictConfig]


def write_run(folder: Path, final: float, **changes: Any) -> Path:
    """A run from 0.5 to ``final``; ``changes`` are to the configuration, or to the summary where that has the key."""
    config = {"family": "sol_rl", "pool": 96, "lr": 3e-4, "seed": 1}
    summary = {
        "status": "completed",
        "reward": "shapes",
        "base_reward": 0.5,
        "final_reward": final,
        "improvement": final - 0.5,
        "seconds_per_stage": {"iteration": {"total": None, "median": 2.0}},
        "rank_fidelity": {"first": {"spearman": 0.9}, "last": {"spearman": 0.8}},
        "evaluations": [{"iteration": 0, "shapes": 0.5}, {"iteration": 10, "shapes": final}],
        "config": config,
    }
    for key, value in changes.items():
        (summary if key in summary else config)[key] = value
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def compared(compose: Compose, folder: Path, pattern: str = "*") -> dict[str, Any]:
    return compare(compose("task=compare", f"task.runs={folder}/{pattern}"))


def test_groups_are_what_differs_but_for_the_seed_with_means_and_sample_deviations(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    for seed, final in ((1, 0.6), (2, 0.7), (3, 0.8)):
        write_run(runs / f"{seed}_a", final, seed=seed)
        write_run(runs / f"{seed}_b", final - 0.1 * seed, seed=seed, family="diffusionnft", pool=24, rank_fidelity=None)
    result = compared(compose, runs)
    first, second = result["groups"]
    assert (first["group"], second["group"]) == ("family=sol_rl pool=96", "family=diffusionnft pool=24")
    assert first["seeds"] == second["seeds"] == [1, 2, 3]
    assert first["final"] == {"mean": pytest.approx(0.7), "std": pytest.approx(0.1)}
    assert first["improvement"] == {"mean": pytest.approx(0.2), "std": pytest.approx(0.1)}
    assert first["base"] == {"mean": 0.5, "std": 0}
    assert first["seconds_per_iteration"]["mean"] == 2
    assert (first["spearman_first"]["mean"], first["spearman_last"]["mean"]) == pytest.approx((0.9, 0.8))
    assert second["spearman_first"] is None
    assert first["difference"] is None and first["against"] is None
    # Differences -0.1, -0.2, -0.3: standard error 0.1 / sqrt(3), and t = 4.3027 for two degrees of freedom.
    difference = second["difference"]
    assert second["difference_per_seed"] == pytest.approx({"1": -0.1, "2": -0.2, "3": -0.3})
    assert difference["mean"] == pytest.approx(-0.2)
    assert difference["std"] == pytest.approx(0.1)
    assert difference["high"] - difference["mean"] == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)
    assert json.loads((tmp_path / "compare.json").read_text()) == result
    shown = capfd.readouterr().out
    assert "0.7000 +- 0.1000" in shown
    assert "-0.2000 [-0.4484, +0.0484] over 3" in shown
    with Image.open(tmp_path / "compare.png") as picture:
        assert picture.size == (960, 600)


def test_groups_of_one_seed_are_named_as_such(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    for seed in (1, 2):
        write_run(runs / f"1_{seed}", 0.6, seed=seed)
    write_run(runs / "2", 0.6, family="diffusionnft")
    compared(compose, runs)
    shown = capfd.readouterr().out
    assert "+0.0000 over 1\n" in shown
    assert "one seed, so no deviation and no interval: family=diffusionnft; a difference may be chance." in shown
    compared(compose, runs, "1_*")
    assert "no interval" not in capfd.readouterr().out


def test_differences_are_taken_over_the_seeds_that_both_groups_have(compose: Compose, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed in (1, 2):
        write_run(runs / f"1_{seed}", 0.6, seed=seed)
    for seed in (2, 3):
        write_run(runs / f"2_{seed}", 0.7, seed=seed, lr=1e-3)
    for seed in (4, 5):
        write_run(runs / f"3_{seed}", 0.7, seed=seed, lr=1e-2)
    _, overlapping, apart = compared(compose, runs)["groups"]
    assert overlapping["difference_per_seed"] == pytest.approx({"2": 0.1})
    assert overlapping["difference"]["low"] is None
    assert apart["difference"] is None and apart["final"]["mean"] == pytest.approx(0.7)


def test_runs_that_are_not_finished_are_listed_and_left_out(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "done", 0.6)
    write_run(runs / "stopped", 0.9, status="interrupted")
    write_run(runs / "blind", 0.9, final_reward=None)
    (runs / "running" / ".hydra").mkdir(parents=True)
    (runs / "no_run").mkdir()
    (runs / "multirun.yaml").touch()
    result = compared(compose, runs)
    reasons = {Path(run).name: reason for run, reason in result["left_out"].items()}
    assert reasons == {
        "stopped": "interrupted",
        "blind": "never evaluated",
        "running": "has no summary.json (yet)",
    }
    assert [Path(run).name for run in result["groups"][0]["runs"]] == ["done"]
    assert f"left out {runs / 'stopped'}: interrupted" in capfd.readouterr().out


def test_of_two_runs_with_one_configuration_and_seed_the_later_counts(compose: Compose, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "9", 0.6)
    write_run(tmp_path / "runs" / "10", 0.7)
    result = compared(compose, tmp_path / "runs")
    assert result["groups"][0]["final"] == {"mean": 0.7, "std": None}
    assert [Path(run).name for run in result["left_out"]] == ["9"]


def test_a_glob_without_runs_and_one_without_finished_runs_are_mistakes(compose: Compose, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="matches nothing[.] Give one that matches runs"):
        compared(compose, tmp_path / "runs")
    for name in ("empty", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    with pytest.raises(UserError, match="matches 2 files or folders, none of which is a run's[.] Give"):
        compared(compose, tmp_path / "runs")
    write_run(tmp_path / "runs" / "failed", 0.6, status="failed")
    with pytest.raises(UserError, match="of 1 that match .* none is: .*failed: failed"):
        compared(compose, tmp_path / "runs")
    assert not (tmp_path / "compare.json").exists()


def test_curves_hold_the_evaluations_of_a_run(tmp_path: Path) -> None:
    evaluations = [{"iteration": 0, "shapes": 0.5}, {"iteration": 5, "shapes": None}, {"iteration": 10, "shapes": 0.6}]
    (run,), _ = read_runs([write_run(tmp_path / "run", 0.6, evaluations=evaluations)])
    assert learning_curve(run) == {0: 0.5, 10: 0.6}


def test_the_iterations_of_short_runs_are_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []

    def recorded(**options: Any) -> Figure:
        figures.append(Figure(**options))
        return figures[-1]

    monkeypatch.setattr("solrl_lightning.tasks.compare.Figure", recorded)
    evaluations = [{"iteration": iteration, "shapes": 0.5} for iteration in (0, 1, 2)]
    runs, _ = read_runs([write_run(tmp_path / "run", 0.6, evaluations=evaluations)])
    draw_curves([Group("all", runs)], "shapes")
    ticks = figures[0].axes[0].get_xticks()
    assert {0, 1, 2} <= set(ticks) and all(tick == round(tick) for tick in ticks)


def test_compare_is_a_command(command: Callable[..., Any], tmp_path: Path) -> None:
    write_run(tmp_path / "outputs" / "multirun" / "today" / "0_seed-1", 0.75)
    finished = command("task=compare", "hydra.run.dir=table")
    assert finished.status == 0, finished.err
    assert "0.7500" in finished.out
    assert (tmp_path / "table" / "compare.json").is_file()
