"""The comparison of runs, with hand-written summaries."""

import functools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf, open_dict
from PIL import Image

from solrl_lightning.artifacts.finished_runs import Run, read_runs
from solrl_lightning.cli.config import ConfigTree
from solrl_lightning.cli.resume import digest
from solrl_lightning.errors import UserError
from solrl_lightning.study.elsewhere import counts
from solrl_lightning.study.run_groups import Settings, costs, group_names, group_runs, learning_curve
from solrl_lightning.tasks.compare import compare

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
    choices = {
        group: cfg.hydra.runtime.choices[group] for group in ("model", "family", "objective", "scheduler", "precision")
    }
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
    OmegaConf.save(list(arguments), folder / ".hydra" / "overrides.yaml")
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    return folder


def compared(compose: Compose, folder: Path, pattern: str = "*", *arguments: str) -> dict[str, Any]:
    return compare(compose("task=compare", f"task.runs='{folder}/{pattern}'", *arguments))


def rows(*rewards: float, seconds: float = 10, evaluations: int = 100, every: int = 2) -> list[dict[str, Any]]:
    """Evaluations after 0, ``every``, ... iterations, each of which takes ``seconds`` and ``evaluations``."""
    return [
        {
            "iteration": i * every,
            "seconds": i * every * seconds,
            "evaluations": i * every * evaluations,
            "shapes": reward,
        }
        for i, reward in enumerate(rewards)
    ]


def write_curve(folder: Path, evaluations: list[dict[str, Any]], *arguments: str, seed: int = 1) -> Path:
    return write_run(folder, evaluations[-1]["shapes"], *arguments, seed=seed, evaluations=evaluations)


@pytest.mark.usefixtures("figures")
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
    assert second["difference"] is None and second["against"] is None
    assert result["reference"] == first["against"] == "family=diffusionnft"
    # Differences 0.1, 0.2, 0.3: standard error 0.1 / sqrt(3), and t = 4.3027 for two degrees of freedom.
    difference = first["difference"]
    assert first["difference_per_seed"] == pytest.approx({"1": 0.1, "2": 0.2, "3": 0.3})
    assert difference["mean"] == pytest.approx(0.2)
    assert difference["std"] == pytest.approx(0.1)
    assert difference["high"] - difference["mean"] == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)
    assert json.loads((tmp_path / "compare.json").read_text()) == result
    shown = capfd.readouterr().out
    assert "0.70 ± 0.10" in shown
    assert "+0.200 [-0.048, +0.448] over 3" in shown
    with Image.open(tmp_path / "compare.png") as picture:
        assert picture.width == 1600
    report = (tmp_path / "report.html").read_text()
    assert re.search(r"highest final reward\W[^=]{0,40}>0[.]7000<.{0,20}>of no group for certain: an interval", report)
    for text in ("0.70 ± 0.10", "+0.200 [-0.048, +0.448] over 3", "6 finished runs", "shapes reward by iterations"):
        assert text in report


def test_groups_of_one_seed_have_no_deviation(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    for seed in (1, 2):
        write_run(runs / f"1_{seed}", 0.6, seed=seed)
    write_run(runs / "2", 0.6, "family=diffusionnft")
    compared(compose, runs)
    shown = capfd.readouterr().out
    assert "+0.000 over 1 " in shown
    assert "a group of one seed has no deviation and no interval, so its difference may be chance" in shown
    compared(compose, runs, "1_*")
    assert "no interval" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["objective.beta=1.0", "objective.beta=0.5"], None),
        (["family.explore.steps=6", "family.explore.steps=4"], None),
        (["", "model.preview_steps=6"], ["model.preview_steps=4", "model.preview_steps=6"]),
        (["family=diffusionnft", "family=sol_rl", "family.pool=48"], None),
        (["model=tiny", "model=flux1"], None),
        (
            ["objective.beta=0.5 evaluation.every=3", "family=diffusionnft"],
            ["objective.beta=0.5", "family=diffusionnft"],
        ),
        (["family=race optimizer.lr=0.001", "family=race", "family=prefix", "family=prefix objective=awm"], None),
        (["objective=nft", "objective=flow_grpo", "objective=flow_grpo optimizer_steps=4"], None),
        (["iterations=9 family=prefix", "family=race iterations=9"], ["family=prefix", "family=race"]),
        (["objective.beta=1", "family=prefix"], ["family=sol_rl", "family=prefix"]),  # 1 is the default
        (["experiment=published", ""], ["experiment=published", "experiment=null"]),
        (["seed=3"], ["family=sol_rl"]),
        (
            [f"model.lora.rank={rank} model.lora.alpha=$\\{{model.lora.rank\\}}" for rank in (4, 8)],
            ["model.lora.rank=4", "model.lora.rank=8"],  # which alpha follows
        ),
    ],
    ids=lambda value: value and value[-1] or "-",
)
def test_names_are_the_overrides_in_which_groups_differ(
    tmp_path: Path, arguments: list[str], names: list[str] | None
) -> None:
    folders = [write_run(tmp_path / str(i), 0.6, *one.split()) for i, one in enumerate(arguments)]
    groups, superseded = group_runs(read_runs(folders)[0])
    assert [group.name for group in groups] == (names or arguments)
    assert superseded == {}


def test_a_run_that_reads_a_variable_of_another_shell_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_DATA", "prompts")
    folders = [write_run(tmp_path / "a", 0.6), write_run(tmp_path / "b", 0.6, "data.train='${oc.env:SOME_DATA}.txt'")]
    runs = read_runs(folders)[0]
    assert len(group_runs(runs)[0]) == 2
    monkeypatch.delenv("SOME_DATA")
    groups, left_out = group_runs(runs)
    reason = "data.train reads the environment variable SOME_DATA, which is not set. Run export SOME_DATA=<value>"
    assert (len(groups), left_out) == (1, {str(folders[1]): reason})
    with pytest.raises(UserError, match="the configuration of none .* SOME_DATA=<value>[.]$"):
        group_runs(runs[1:])


def test_runs_that_read_other_values_of_a_variable_are_of_other_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_RATE", "0.05")
    for name, rate in (("a", 0.002), ("b", 0.05)):
        folder = write_run(tmp_path / name, 0.6, 'optimizer.lr="${oc.decode:${oc.env:MY_RATE}}"')
        (folder / ".hydra" / "digests.json").write_text(json.dumps({"optimizer.lr": digest(rate)}))
    groups, left_out = group_runs(read_runs([tmp_path / "a", tmp_path / "b"])[0])
    assert [group.name for group in groups] == [f"optimizer.lr=<digest {digest(0.002)[:8]}>", "optimizer.lr=0.05"]
    assert left_out == {}


def test_runs_of_other_prompts_in_files_of_one_name_are_of_other_groups(tmp_path: Path) -> None:
    for name, seed, content in (("a", 1, "0123456789"), ("b", 2, "0123456789"), ("c", 1, "abcdefghij")):
        digests = {"data.train": content, "model.pretrained": "f" * 32}
        write_run(tmp_path / name, 0.6, "data.train=prompts.txt", seed=seed, digests=digests)
    groups, left_out = group_runs(read_runs([tmp_path / name for name in "abc"])[0])
    assert [group.name for group in groups] == ["data.train.digest=01234567", "data.train.digest=abcdefgh"]
    assert [list(group.finals) for group in groups] == [[1, 2], [1]] and not left_out


def test_settings_of_a_group_have_what_an_option_sets(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, 0.6, f"objective={name}") for name in ("nft", "flow_grpo")]
    groups, _ = group_runs(read_runs(folders)[0])
    assert [group.settings["old_policy.decay_type"] for group in groups] == [1, 0]


def test_costs_to_the_points_on_the_way_to_the_plateau(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    for seed, shift in ((1, 0.0), (2, 0.01), (3, -0.01)):
        # The last third of 240 s is that from 160 s on.
        slow = [reward + shift for reward in (0.4, 0.44, 0.46, 0.48, 0.49, 0.51, 0.5)]
        write_curve(runs / f"1_{seed}", rows(*slow, seconds=20), "family=diffusionnft", seed=seed)
        fast = rows(*(reward + shift for reward in (0.4, 0.48, 0.56, 0.6)), seconds=30, evaluations=300)
        write_curve(runs / f"2_{seed}", fast, "family=sol_rl", seed=seed)
        write_curve(runs / f"3_{seed}", rows(0.4 + shift, 0.43 + shift, 0.42 + shift), "family=compile", seed=seed)
    result = compared(compose, runs)
    assert (result["plateau"], result["base"], result["rise"]) == pytest.approx((0.5, 0.4, 0.1))
    assert result["levelled_off"] is False
    reference, fast, never = (group["to_reference"] for group in result["groups"])

    def means(points: dict[str, Any]) -> list[float | None]:
        return [point["mean"] for point in points["points"].values()]

    assert list(reference["seconds"]["points"]) == ["25", "50", "75", "100"]
    assert means(reference["seconds"]) == pytest.approx([25, 60, 110, 180])
    assert means(fast["seconds"]) == pytest.approx([18.75, 37.5, 56.25, 75])
    assert [means(fast[cost])[3] for cost in ("iteration", "evaluations")] == pytest.approx([2.5, 750])
    assert means(never["seconds"]) == [pytest.approx(50 / 3), None, None, None]
    point = fast["seconds"]["points"]["75"]
    assert (point["low"], point["high"], point["spent"]) == pytest.approx((56.25, 56.25, 180))  # equal differences
    assert (point["interval"], point["speed_up"]["mean"]) == ("paired by seed", pytest.approx(110 / 56.25))
    assert {each["speed_up"] for each in reference["seconds"]["points"].values()} == {None}
    above = [group["above_plateau"] for group in result["groups"]]
    assert above[0] is None and above[1]["low"] == above[1]["high"] == pytest.approx(0.08)
    shown = capfd.readouterr().out
    seconds, evaluations = shown.split("to a share of the reference's progress")[1:]
    assert re.search(r"sol_rl +19 \[19, 19\] +38 .* +75 \[75, 75\] +2[.]40 \[2[.]40, 2[.]40\] +[+]0[.]0800 \[", seconds)
    assert re.search(r"compile +17 \[17, 17\]( +not reached after 40){3} +- +-0[.]0800 \[", seconds)
    assert re.search(r"sol_rl .* +750 \[750, 750\] +1[.]20 ", evaluations)
    assert "from 0.4000 before training to 0.5000, the plateau" in seconds
    assert (
        "the reference still rises, by 10% of its progress within its last third; train longer, by max_sec" in seconds
    )
    report = (tmp_path / "report.html").read_text()
    assert "Seconds of training to the plateau of the reference" in report and "The reference still rises" in report


@pytest.mark.parametrize(
    ("rewards", "note"),
    [
        ((0.4, 0.5, 0.5, 0.5, 0.505), None),
        ((0.5, 0.6, 0.45), "the reference ends no higher than it began; name another one"),
        ((0.4, 0.5, 0.5), "whether the reference has levelled off is unknown; train longer, by "),
    ],
)
def test_what_hides_a_plateau_is_reported(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str], rewards: tuple[float, ...], note: str | None
) -> None:
    write_curve(tmp_path / "runs" / "1", rows(*rewards), "family=diffusionnft")
    write_curve(tmp_path / "runs" / "2", rows(0.5, 0.6, 0.7))
    result = compared(compose, tmp_path / "runs")
    shown = capfd.readouterr().out
    assert result["levelled_off"] == (True if note is None else None)
    assert "still rises" not in shown and [text in shown for text in ("no higher", "unknown")].count(True) == bool(note)
    assert note is None or note in shown
    progress = rewards[-1] > rewards[0]
    assert ("to the plateau of the reference" in (tmp_path / "report.html").read_text()) == progress


def test_an_interval_that_ends_after_the_run_is_open(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    for seed, final in ((1, 0.51), (2, 0.5), (3, 0.58)):
        write_curve(runs / f"1_{seed}", rows(0.4, 0.5), "family=diffusionnft", seed=seed)
        write_curve(runs / f"2_{seed}", rows(0.4, final, seconds=20), seed=seed)
    seconds = compared(compose, runs)["groups"][1]["to_reference"]["seconds"]["points"]["100"]
    assert seconds["low"] < seconds["mean"] < seconds["spent"] == 40 and seconds["high"] is None
    assert (seconds["speed_up"]["low"], seconds["speed_up"]["high"]) == (None, pytest.approx(20 / seconds["low"]))
    assert re.search(r"\d+ \[\d+, > 40\] +0[.]\d+ \[< 0[.]50, ", capfd.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "reference"),
    [
        ([], "family=diffusionnft"),
        (["task.reference=sol_rl"], "family=sol_rl"),
        (["task.reference='family.pool=48'"], "family=sol_rl family.pool=48"),
        (["task.reference='48 family=sol_rl'"], "family=sol_rl family.pool=48"),
    ],
)
def test_the_reference_is_diffusionnft_or_the_group_with_the_words(
    compose: Compose, tmp_path: Path, arguments: list[str], reference: str
) -> None:
    for number, overrides in enumerate(("family=sol_rl", "family=diffusionnft", "family=sol_rl family.pool=48")):
        write_run(tmp_path / "runs" / str(number), 0.6, *overrides.split())
    result = compared(compose, tmp_path / "runs", "*", *arguments)
    assert result["reference"] == reference
    assert {group["against"] for group in result["groups"]} == {None, reference}


def test_without_diffusionnft_the_first_group_is_the_reference_and_an_unknown_one_is_an_error(
    compose: Compose, tmp_path: Path
) -> None:
    for number, overrides in enumerate(("family=sol_rl", "family=prefix")):
        write_run(tmp_path / "runs" / str(number), 0.6, overrides)
    assert compared(compose, tmp_path / "runs")["reference"] == "family=sol_rl"
    with pytest.raises(UserError, match="task.reference=race is invalid: .* are family=sol_rl; family=prefix[.] Use"):
        compared(compose, tmp_path / "runs", "*", "task.reference=race")


def test_runs_of_an_older_version_have_iterations_only(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    old = [{"iteration": i, "shapes": reward} for i, reward in ((0, 0.4), (2, 0.45), (4, 0.5))]
    resumed = [*old[:2], rows(0, 0, 0.5)[2]]  # counts from its resume
    write_curve(runs / "1_1", old, "family=diffusionnft")
    write_curve(runs / "1_2", resumed, "family=diffusionnft", seed=2)
    write_curve(runs / "1_3", rows(0.4, 0.45, 0.5), "family=diffusionnft", seed=3)
    write_curve(runs / "2_1", old)
    first, second = (group["to_reference"] for group in compared(compose, runs)["groups"])
    assert first["iteration"]["points"]["100"]["mean"] == 4 and first["seconds"]["points"]["100"]["mean"] == 40
    assert [Path(run).name for run in first["seconds"]["unknown"]] == ["1_1", "1_2"]
    assert second["iteration"]["points"]["100"]["mean"] == 4
    assert second["seconds"]["points"] == second["evaluations"]["points"] == {}
    shown = capfd.readouterr().out
    assert f"without seconds and forward passes (of an older version): {runs / '1_1'}, {runs / '1_2'}\n" in shown
    assert f"(of an older version): {runs / '2_1'}\n" in shown
    (run,), _ = read_runs([runs / "1_2"])
    assert list(costs(run, "iteration")) == [0, 2, 4] and costs(run, "seconds") == {}
    compared(compose, runs, "*_1")
    assert "\niterations to a share of the reference's progress\n" in capfd.readouterr().out


def test_groups_with_other_seeds_are_compared_on_the_common_ones(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second seed begins above what the first one ends with."""
    runs = tmp_path / "runs"
    write_curve(runs / "1_1", rows(0.3, 0.35, 0.4), "family=diffusionnft")
    for seed, base in ((1, 0.3), (2, 0.6)):
        write_curve(runs / f"2_{seed}", rows(base, base + 0.05, base + 0.2), seed=seed)
    points = compared(compose, runs)["groups"][1]["to_reference"]["iteration"]["points"]
    assert points["100"]["mean"] == pytest.approx(2 + 2 / 3) and points["25"]["mean"] == pytest.approx(1)
    assert points["100"]["speed_up"]["mean"] == pytest.approx(4 / (2 + 2 / 3))
    shown = capfd.readouterr().out
    assert "shares of progress are of the seeds that a group has in common with the reference, if any\n" in shown
    compared(compose, runs, "?_1")
    assert "in common" not in capfd.readouterr().out


def test_name_of_a_group_has_each_key_once_and_no_followers() -> None:
    columns = [(2, None), (2, "x"), (3, None)]
    settings = [
        Settings({"iterations": n, "reward.red.what": what, "trainer.max_epochs": n}, {}, {"iterations": str(n)})
        for n, what in columns
    ]
    first, second = (f"iterations=2 reward.red.what={what}" for what in ("null", "x"))
    assert group_names(settings) == [first, second, "iterations=3"]


def test_observing_keys_paths_and_explicit_defaults_make_no_group(tmp_path: Path) -> None:
    other = ["evaluation.every=5", "callbacks.sample_grid.every=0", "trainer=ddp", "ckpt=some/file"]
    other += ["iterations=36", "objective.beta=1"]
    folders = [write_run(tmp_path / str(i), 0.6, *(other if i else []), seed=i) for i in range(2)]
    (group,), _ = group_runs(read_runs(folders)[0])
    assert (group.name, [run.seed for run in group.runs], group.settings) == ("family=sol_rl", [0, 1], {})


def test_callbacks_that_change_the_result_make_groups(tmp_path: Path) -> None:
    changes = ["+callbacks.mine={_target_:mine.Rate,rate:2}", "~callbacks.ema", "callbacks=early_stopping"]
    folders = [write_run(tmp_path / str(i), 0.6, *changes[:i][-1:]) for i in range(len(changes) + 1)]
    groups, left_out = group_runs(read_runs(folders)[0])
    assert (len(groups), left_out) == (4, {})
    assert len({group.name for group in groups}) == 4


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
    write_run(runs / "copied", 0.9)
    (runs / "copied" / ".hydra" / "overrides.yaml").unlink()
    (runs / "running" / ".hydra").mkdir(parents=True)
    damage: list[dict[str, Any]] = [{"evaluations": "x"}, {"evaluations": [{"iteration": 0}]}, {"config": []}]
    damage += [{"final_reward": "0.9"}, {"reward": None}, {"status": None}]
    summary = json.loads((runs / "done" / "summary.json").read_text())
    for number, change in enumerate(damage):
        write_run(runs / f"damaged{number}", 0.9)
        (runs / f"damaged{number}" / "summary.json").write_text(json.dumps(summary | change))
    (runs / "no_run").mkdir()
    (runs / "multirun.yaml").touch()
    result = compared(compose, runs)
    reasons = {Path(run).name: reason for run, reason in result["left_out"].items()}
    assert reasons == {
        **{f"damaged{number}": "its summary.json is damaged" for number in range(len(damage))},
        "stopped": "interrupted",
        "blind": "never evaluated",
        "bare": "has no .hydra/config.yaml",
        "copied": "has no .hydra/overrides.yaml",
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


def test_a_later_run_is_one_that_ended_later_whatever_its_name(compose: Compose, tmp_path: Path) -> None:
    for name, final in (("old", 0.6), ("new", 0.7)):
        write_run(tmp_path / "runs" / name, final)
    os.utime(tmp_path / "runs" / "old" / "summary.json", (1, 1))
    result = compared(compose, tmp_path / "runs")
    assert result["groups"][0]["final"]["mean"] == 0.7
    assert result["left_out"] == {
        str(tmp_path / "runs" / "old"): f"{tmp_path}/runs/new is a later run of the same configuration and seed"
    }


def test_a_run_that_stopped_early_replaces_no_completed_one(compose: Compose, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "1", 0.6)
    write_run(tmp_path / "runs" / "2", 0.7, status="stopped early")
    write_run(tmp_path / "runs" / "3", 0.6, seed=2, status="stopped early")
    write_run(tmp_path / "runs" / "4", 0.8, seed=2)
    result = compared(compose, tmp_path / "runs")
    assert result["groups"][0]["final"]["mean"] == pytest.approx(0.7)  # of 0.6 and 0.8
    reasons = {Path(run).name: reason.partition(";")[0] for run, reason in result["left_out"].items()}
    later = f"{tmp_path / 'runs' / '4'} is a later run of the same configuration and seed"
    assert reasons == {"2": "stopped early", "3": later}


def test_glob_without_finished_runs_is_an_error(compose: Compose, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it matches 0 files or folders, none of which is a run's[.] Use"):
        compared(compose, tmp_path / "runs")
    write_run(tmp_path / "runs" / "failed", 0.6, status="failed")
    with pytest.raises(UserError, match="it matches .*failed: failed[.] Use"):
        compared(compose, tmp_path / "runs")
    assert not (tmp_path / "compare.json").exists()


def test_a_folder_is_named_without_a_glob(compose: Compose, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "0_reward-[shapes]", 0.6)
    (group,) = compared(compose, tmp_path / "runs", "0_reward-[shapes]")["groups"]
    assert group["group"] == "family=sol_rl"


def test_runs_of_different_rewards_are_an_error(compose: Compose, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "1_shapes", 0.6)
    evaluations = [{"iteration": 0, "clipscore": 0.2}, {"iteration": 10, "clipscore": 0.3}]
    write_run(tmp_path / "runs" / "2_clipscore", 0.3, seed=2, reward="clipscore", evaluations=evaluations)
    with pytest.raises(UserError, match="different rewards, clipscore .in .*2_clip.*, shapes .in .*1_shapes"):
        compared(compose, tmp_path / "runs")
    assert compared(compose, tmp_path / "runs", "*clipscore")["reward"] == "clipscore"


def test_curves_have_the_evaluations_of_a_run(tmp_path: Path) -> None:
    evaluations = [{"iteration": 0, "shapes": 0.5}, {"iteration": 5, "shapes": None}, {"iteration": 10, "shapes": 0.6}]
    (run,), _ = read_runs([write_run(tmp_path / "run", 0.6, evaluations=evaluations)])
    assert learning_curve(run) == {0: 0.5, 10: 0.6}


def test_the_cost_of_a_group_is_the_mean_over_its_seeds(tmp_path: Path) -> None:
    folders = [write_curve(tmp_path / str(seed), rows(0.4, 0.5, seconds=10 * seed), seed=seed) for seed in (1, 2)]
    (group,), _ = group_runs(read_runs(folders)[0])
    assert {cost: curve.cost for cost, curve in group.curves.items()} == {
        "iteration": [0, 2],
        "seconds": [0, 30],
        "evaluations": [0, 200],
    }


def test_the_plateau_of_a_run_is_that_of_its_seconds(tmp_path: Path) -> None:
    spent = [{"iteration": 2 * i, "seconds": s, "shapes": r} for i, s, r in ((0, 0, 0.4), (1, 80, 0.5), (2, 90, 0.6))]
    spent.append({"iteration": 6, "seconds": 100, "shapes": 0.7})
    old = [{"iteration": row["iteration"], "shapes": row["shapes"]} for row in spent]
    folders = [write_curve(tmp_path / str(seed), each, seed=seed) for seed, each in enumerate((spent, old))]
    (group,), _ = group_runs(read_runs(folders)[0])
    assert [each.level for each in group.plateaus.values()] == pytest.approx([0.6, 0.65])


def stage_totals(**seconds: float) -> dict[str, Any]:
    return {name: {"total": total, "median": None} for name, total in seconds.items()}


def test_factors_of_stages_simulate_the_seconds_of_another_machine(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs, curve = tmp_path / "runs", rows(0.4, 0.45, 0.5)  # 10 s an iteration
    reference = stage_totals(regenerate=10, train=30, evaluate=99)
    write_run(runs / "1", 0.5, "family=diffusionnft", evaluations=curve, seconds_per_stage=reference)
    slow = stage_totals(requantize=1, explore=24, regenerate=5, train=10)
    write_run(runs / "2", 0.5, evaluations=curve, seconds_per_stage=slow)
    result = compared(compose, runs, "*", "task.cost={explore: 0.25}")
    first, second = (group["to_reference"] for group in result["groups"])
    assert [each["simulated_seconds"]["points"]["100"]["mean"] for each in (first, second)] == pytest.approx([40, 22])
    assert second["seconds"]["points"]["100"]["mean"] == 40  # as measured
    assert second["simulated_seconds"]["points"]["100"]["speed_up"]["mean"] == pytest.approx(40 / 22)
    assert [group["simulated_seconds_per_iteration"] for group in result["groups"]] == pytest.approx([10, 5.5])
    note = "terations are measured, seconds are simulated: measured seconds with explore x 0.25"
    shown, report = capfd.readouterr().out, (tmp_path / "report.html").read_text()
    assert f"i{note}" in shown and f"I{note}." in report and result["simulated"]["note"] == f"i{note}"
    assert "\nsimulated seconds of training to a share" in shown
    assert "shapes reward by simulated seconds of training" in report
    write_run(runs / "3", 0.5, evaluations=curve)
    with pytest.raises(UserError, match="3 has not recorded the seconds of its stages[.] Leave it out of task.runs"):
        compared(compose, runs, "*", "task.cost={explore: 0.25}")
    assert "simulated" not in json.dumps(compared(compose, runs)["groups"][0]["to_reference"])


@pytest.mark.parametrize(
    ("arguments", "changes", "expected"),
    [
        (["model=flux1", "prompts_per_iteration=6"], {}, (3456, 1440, 720, 576)),
        (["model=flux1", "prompts_per_iteration=6"], {"precision_backend": "bf16"}, (0, 1440 + 3456, 720, 576)),
        (["model=sana", "prompts_per_iteration=6", "model.guidance_scale=4.5"], {}, (6912, 2880, 720, 864)),
        (["family=diffusionnft", "prompts_per_iteration=2"], {}, (0, 480, 48, 96)),
        (["family=naive_quant", "prompts_per_iteration=1"], {}, (960, 0, 96, 48)),
        (["family=prefix", "prompts_per_iteration=1"], {}, (0, 96 * 4 + 24 * 6, 120, 48)),
        (["family=race", "prompts_per_iteration=1"], {}, (0, 96 * 3 + 48 * 2 + 24 * 5, 96 + 48 + 24, 48)),
    ],
)
def test_counts_of_an_iteration_are_those_of_its_configuration(
    tmp_path: Path, arguments: list[str], changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    (run,), _ = read_runs([write_run(tmp_path / "run", 0.6, *arguments, **({"precision_backend": "nvfp4"} | changes))])
    totals = counts(run)
    assert tuple(totals[unit] for unit in ("shadow", "bf16", "image", "row")) == expected


def test_a_table_simulates_the_seconds_of_another_machine(compose: Compose, tmp_path: Path) -> None:
    options = ("model=flux1", "prompts_per_iteration=6")
    write_curve(tmp_path / "runs" / "1", rows(0.4, 0.5), *options)
    result = compared(compose, tmp_path / "runs", "*", "task.cost=flux1_h100")
    assert result["groups"][0]["simulated_seconds_per_iteration"] == pytest.approx(206)
    assert result["simulated"]["machine"]["shadow"] == pytest.approx(0.02, rel=0.002)
    levels = ("family=prefix", "family.explore.stop_after=null", "family.explore.stop_below=0.7")
    write_curve(tmp_path / "runs" / "2", rows(0.4, 0.5), *levels)
    with pytest.raises(
        UserError, match="runs/2 explores down to noise levels, .* Use task.cost=flux1_h100 or 'task.cost={explore: 0"
    ):
        compared(compose, tmp_path / "runs", "*", "task.cost=flux1_h100")


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave compare.png empty where no test looks at it."""
    if "figures" not in request.fixturenames:
        monkeypatch.setattr("solrl_lightning.tasks.compare.draw_curves", lambda groups, result: b"")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The pictures that are drawn."""
    drawn: list[Figure] = []

    def recorded(**options: Any) -> Figure:
        figure = Figure(**options)
        if "layout" in options:  # the charts of a page have none
            drawn.append(figure)
        return figure

    monkeypatch.setattr("matplotlib.figure.Figure", recorded)
    return drawn


def test_the_picture_has_a_panel_for_every_cost_and_the_groups_that_have_it(
    compose: Compose, tmp_path: Path, figures: list[Figure]
) -> None:
    runs, old = tmp_path / "runs", [{"iteration": 0, "shapes": 0.4}, {"iteration": 2, "shapes": 0.44}]
    for seed in (1, 2):
        write_curve(runs / f"1_{seed}", rows(0.4, 0.5 + 0.02 * seed, seconds=3600), "family=diffusionnft", seed=seed)
        write_curve(runs / f"2_{seed}", rows(0.4, 0.6, seconds=7200), "family=sol_rl", seed=seed)
        write_curve(runs / f"3_{seed}", old, "family=prefix", seed=seed)
    compared(compose, runs)
    panel, seconds, _ = figures[0].axes
    assert [panel.get_xlabel() for panel in figures[0].axes] == ["iterations", "hours of training", "forward passes"]
    areas = [sum(isinstance(part, PolyCollection) for part in panel.collections) for panel in figures[0].axes]
    dots = [sum(isinstance(part, PathCollection) for part in panel.collections) for panel in figures[0].axes]
    assert areas == [3, 2, 2] and dots == [3, 2, 2]
    _, reached, short = (part.get_offsets() for part in panel.collections if isinstance(part, PathCollection))
    assert [y for _, y in reached] == pytest.approx([0.4325, 0.465, 0.4975, 0.53]) and len(short) == 1  # 25 %
    reached = [part.get_offsets()[3].tolist() for part in seconds.collections if isinstance(part, PathCollection)]
    assert reached == [pytest.approx([2.0, 0.53]), pytest.approx([2.6, 0.53])]
    dashed = [line.get_ydata()[0] for line in seconds.lines if line.get_linewidth() == 0.8]
    assert dashed == [pytest.approx(0.53)]
    mean = next(line for line in seconds.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 1.6)
    assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([0, 2], pytest.approx([0.4, 0.53]))
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert legend == ["family=diffusionnft: 2.0 h", "family=sol_rl: 2.6 h, 0.77x", "family=prefix"]
    compared(compose, runs, "3_*")
    assert [panel.get_xlabel() for panel in figures[1].axes] == ["iterations"]


def test_compare_is_a_command(command: Callable[..., Any], tmp_path: Path) -> None:
    write_run(tmp_path / "outputs" / "multirun" / "today" / "0_seed-1", 0.75)
    finished = command("task=compare", "hydra.run.dir=table")
    assert finished.status == 0, finished.err
    assert "0.7500" in finished.out
    assert (tmp_path / "table" / "compare.json").is_file()


def test_runs_of_precision_auto_are_grouped_by_the_precision_that_they_took(tmp_path: Path) -> None:
    taken = {"a": "nvfp4 (emulated)", "b": "fp8 (torch)", "c": "nvfp4 (torch)"}
    folders = [
        write_run(tmp_path / name, 0.6, seed=i, precision_backend=by) for i, (name, by) in enumerate(taken.items())
    ]
    folders.append(write_run(tmp_path / "d", 0.6, "precision=nvfp4", seed=3, precision_backend="nvfp4 (emulated)"))
    groups, _ = group_runs([Run(str(folder), json.loads((folder / "summary.json").read_text())) for folder in folders])
    assert {group.name: sorted(group.finals) for group in groups} == {
        "precision=nvfp4": [0, 2, 3],
        "precision=fp8": [1],
    }
