"""The comparison of runs, with hand-written summaries."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf, open_dict
from PIL import Image

from solrl_lightning.config import ConfigTree
from solrl_lightning.errors import UserError
from solrl_lightning.finished_runs import read_runs
from solrl_lightning.tasks.compare import Group, compare, draw_curves, group_runs, learning_curve

Compose = Callable[..., DictConfig]


@functools.cache
def composed(*arguments: str) -> DictConfig:
    """The configuration with Hydra's own keys and interpolations, as recorded in ``.hydra``."""
    with ConfigTree() as tree:
        return tree.compose(arguments)


def write_run(folder: Path, final: float, *arguments: str, seed: int = 1, **changes: Any) -> Path:
    """Write the run of a command line with rewards from 0.5 to ``final``; ``changes`` override keys of its summary."""
    cfg = composed(*arguments).copy()
    cfg.seed = seed
    choices = {group: cfg.hydra.runtime.choices[group] for group in ("model", "family", "objective", "precision")}
    summary = {
        "status": "completed",
        "reward": "shapes",
        "base_reward": 0.5,
        "final_reward": final,
        "improvement": final - 0.5,
        "seconds_per_stage": {"iteration": {"total": None, "median": 2.0}},
        "rank_fidelity": {"first": {"spearman": 0.9}, "last": {"spearman": 0.8}},
        "evaluations": [{"iteration": 0, "shapes": 0.5}, {"iteration": 10, "shapes": final}],
        "config": choices | {"seed": cfg.seed},
    }
    with open_dict(cfg):
        del cfg["hydra"]
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(cfg, folder / ".hydra" / "config.yaml")
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    return folder


def compared(compose: Compose, folder: Path, pattern: str = "*") -> dict[str, Any]:
    return compare(compose("task=compare", f"task.runs={folder}/{pattern}"))


def test_groups_differ_in_other_keys_than_the_seed_and_have_means_and_sample_deviations(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    for seed, final in ((1, 0.6), (2, 0.7), (3, 0.8)):
        write_run(runs / f"{seed}_a", final, seed=seed)
        write_run(runs / f"{seed}_b", final - 0.1 * seed, "family=diffusionnft", seed=seed, rank_fidelity=None)
    result = compared(compose, runs)
    first, second = result["groups"]
    assert (first["group"], second["group"]) == ("family=sol_rl", "family=diffusionnft")
    assert (first["settings"]["family.pool"], second["settings"]["family.pool"]) == (96, 24)
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
        assert picture.width == 960


def test_groups_of_one_seed_have_no_deviation(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    for seed in (1, 2):
        write_run(runs / f"1_{seed}", 0.6, seed=seed)
    write_run(runs / "2", 0.6, "family=diffusionnft")
    compared(compose, runs)
    shown = capfd.readouterr().out
    assert "+0.0000 over 1\n" in shown
    assert "a group of one seed has no deviation and no interval, so its difference may be chance" in shown
    compared(compose, runs, "1_*")
    assert "no interval" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["objective.beta=1.0", "objective.beta=0.5"], ["objective.beta=1", "objective.beta=0.5"]),
        (["model.lora.rank=32", "model.lora.rank=8"], ["model.lora.rank=32", "model.lora.rank=8"]),
        (["family.explore.steps=6", "family.explore.steps=4"], ["family.explore.steps=6", "family.explore.steps=4"]),
        (["", "model.preview_steps=4"], ["model.preview_steps=6", "model.preview_steps=4"]),  # explore.steps follows
        (
            ["family=diffusionnft", "family=sol_rl", "family.pool=48"],
            ["family=diffusionnft family.pool=24", "family=sol_rl family.pool=96", "family=sol_rl family.pool=48"],
        ),
        (["model=tiny", "model=flux1"], ["model=tiny", "model=flux1"]),
        (
            ["objective.beta=0.5", "family=diffusionnft"],
            ["family=sol_rl objective.beta=0.5", "family=diffusionnft objective.beta=1"],
        ),
    ],
    ids=lambda value: value[-1] or "-",
)
def test_sweep_over_any_key_makes_a_group_per_value(tmp_path: Path, arguments: list[str], names: list[str]) -> None:
    folders = [write_run(tmp_path / str(i), 0.6, *one.split()) for i, one in enumerate(arguments)]
    groups, superseded = group_runs(read_runs(folders)[0])
    assert [group.name for group in groups] == names
    assert superseded == {}


def test_observing_keys_paths_and_explicit_defaults_make_no_group(tmp_path: Path) -> None:
    other = ["evaluation.every=5", "callbacks.sample_grid.every=0", "trainer=ddp", "ckpt=some/file"]
    other += ["iterations=12", "objective.beta=1"]
    folders = [write_run(tmp_path / str(i), 0.6, *(other if i else []), seed=i) for i in range(2)]
    (group,), _ = group_runs(read_runs(folders)[0])
    assert (group.name, [run.seed for run in group.runs], group.settings) == ("all", [0, 1], {})


def test_differences_are_over_the_seeds_of_both_groups(compose: Compose, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed in (1, 2):
        write_run(runs / f"1_{seed}", 0.6, seed=seed)
    for seed in (2, 3):
        write_run(runs / f"2_{seed}", 0.7, "optimizer.lr=3e-3", seed=seed)
    for seed in (4, 5):
        write_run(runs / f"3_{seed}", 0.7, "optimizer.lr=1e-2", seed=seed)
    _, overlapping, apart = compared(compose, runs)["groups"]
    assert overlapping["difference_per_seed"] == pytest.approx({"2": 0.1})
    assert overlapping["difference"]["low"] is None
    assert apart["difference"] is None and apart["final"]["mean"] == pytest.approx(0.7)


def test_unfinished_runs_are_listed_and_excluded(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "done", 0.6)
    write_run(runs / "early", 0.6, seed=2, status="stopped early")
    write_run(runs / "stopped", 0.9, status="interrupted")
    write_run(runs / "blind", 0.9, final_reward=None)
    write_run(runs / "bare", 0.9)
    (runs / "bare" / ".hydra" / "config.yaml").unlink()
    (runs / "running" / ".hydra").mkdir(parents=True)
    (runs / "no_run").mkdir()
    (runs / "multirun.yaml").touch()
    result = compared(compose, runs)
    reasons = {Path(run).name: reason for run, reason in result["left_out"].items()}
    assert reasons == {
        "stopped": "interrupted",
        "blind": "never evaluated",
        "bare": "has no .hydra/config.yaml",
        "running": "has no summary.json (yet)",
    }
    assert [Path(run).name for run in result["groups"][0]["runs"]] == ["done", "early"]
    assert f"left out {runs / 'stopped'}: interrupted" in capfd.readouterr().out


def test_later_run_of_the_same_configuration_and_seed_wins(compose: Compose, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "9", 0.6)
    write_run(tmp_path / "runs" / "10", 0.7)
    result = compared(compose, tmp_path / "runs")
    assert result["groups"][0]["final"] == {"mean": 0.7, "std": None}
    assert [Path(run).name for run in result["left_out"]] == ["9"]


def test_glob_without_finished_runs_is_an_error(compose: Compose, tmp_path: Path) -> None:
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


def test_curves_have_the_evaluations_of_a_run(tmp_path: Path) -> None:
    evaluations = [{"iteration": 0, "shapes": 0.5}, {"iteration": 5, "shapes": None}, {"iteration": 10, "shapes": 0.6}]
    (run,), _ = read_runs([write_run(tmp_path / "run", 0.6, evaluations=evaluations)])
    assert learning_curve(run) == {0: 0.5, 10: 0.6}


def test_ticks_of_short_runs_are_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []

    def recorded(**options: Any) -> Figure:
        figures.append(Figure(**options))
        return figures[-1]

    monkeypatch.setattr("solrl_lightning.tasks.compare.Figure", recorded)
    evaluations = [{"iteration": iteration, "shapes": 0.5} for iteration in (0, 1, 2)]
    runs, _ = read_runs([write_run(tmp_path / "run", 0.6, evaluations=evaluations)])
    draw_curves([Group("all", runs, {})], "shapes")
    ticks = figures[0].axes[0].get_xticks()
    assert {0, 1, 2} <= set(ticks) and all(tick == round(tick) for tick in ticks)


def test_compare_is_a_command(command: Callable[..., Any], tmp_path: Path) -> None:
    write_run(tmp_path / "outputs" / "multirun" / "today" / "0_seed-1", 0.75)
    finished = command("task=compare", "hydra.run.dir=table")
    assert finished.status == 0, finished.err
    assert "0.7500" in finished.out
    assert (tmp_path / "table" / "compare.json").is_file()
