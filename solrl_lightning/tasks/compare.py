"""task=compare: one table from finished runs.

Runs are grouped by their resolved configurations, without the seed and keys that only observe or place a run. Two
groups share prompts, initial adapters and evaluation noise at equal seeds, so their difference is taken seed by seed.
"""

import io
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from omegaconf import DictConfig, OmegaConf

from solrl_lightning.files import write_atomically
from solrl_lightning.finished_runs import RECORDED_CONFIG, Run, finished_runs
from solrl_lightning.metrics.confidence import mean_of
from solrl_lightning.resume import is_subkey, leaves
from solrl_lightning.tasks.tables import format_table, write_json

# Keys, with those below them, in which runs of one experiment may differ.
_SAME_EXPERIMENT = (
    "seed",
    "ckpt",
    "run_dir",
    "task",
    "callbacks",
    "logger",
    "evaluation",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.default_root_dir",
    "trainer.check_val_every_n_epoch",
)


class Group(NamedTuple):
    """Finished runs that differ in their seed only, one per seed."""

    name: str
    runs: list[Run]
    settings: dict[str, Any]  # what differs between the groups, followers of other keys included


class Settings(NamedTuple):
    """The configuration that identifies an experiment: dotted key -> value."""

    options: dict[str, Any]  # config group -> the option chosen of it
    written: dict[str, Any]  # with interpolations as they are
    resolved: dict[str, Any]


def compare(cfg: DictConfig) -> dict[str, Any]:
    """Print the table of the runs that match ``cfg.task.runs``; write compare.json and compare.png (learning curves).

    Raises:
        UserError: no run matches, or none of them is finished.
    """
    runs, left_out = finished_runs(cfg.task.runs)
    groups, superseded = group_runs(runs)
    left_out |= superseded
    result = {
        "runs": cfg.task.runs,
        "reward": runs[0].summary["reward"],
        "groups": [describe(group, groups[0]) for group in groups],
        "left_out": left_out,
    }
    folder = Path(cfg.run_dir)
    write_json(folder / "compare.json", result)
    write_atomically(folder / "compare.png", draw_curves(groups, result["reward"]))
    print(format_comparison(result, folder))
    return result


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], dict[str, str]]:
    """Groups in the order of their first run, and runs that a later one of the same group and seed replaces."""
    settings = [read_settings(run) for run in runs]
    differing = [key for key in _keys(s.resolved for s in settings) if _differs(key, (s.resolved for s in settings))]
    shown = shown_keys(settings, differing)
    members: dict[str, dict[Any, Run]] = {}
    groups: dict[str, Group] = {}
    superseded = {}
    for run, own in zip(runs, settings, strict=True):
        identity = json.dumps(own.resolved, sort_keys=True)
        earlier = members.setdefault(identity, {}).get(run.seed)
        if earlier is not None:
            superseded[earlier.folder] = f"{run.folder} is a later run of the same configuration and seed"
        members[identity][run.seed] = run
        values = own.options | own.resolved
        name = " ".join(f"{key}={_value(values[key])}" for key in shown if key in values) or "all"
        groups.setdefault(identity, Group(name, [], {key: own.resolved.get(key) for key in differing}))
    return [group._replace(runs=list(members[identity].values())) for identity, group in groups.items()], superseded


def read_settings(run: Run) -> Settings:
    cfg = OmegaConf.load(Path(run.folder) / RECORDED_CONFIG)
    assert isinstance(cfg, DictConfig)
    cfg.run_dir = run.folder
    for group in ("callbacks", "logger"):  # their interpolations need Hydra
        cfg.pop(group, None)
    written, resolved = (leaves(OmegaConf.to_container(cfg, resolve=resolve)) for resolve in (False, True))
    keys = [key for key in resolved if not is_subkey(key, *_SAME_EXPERIMENT)]
    groups = {key.partition(".")[0] for key in keys if "." in key}
    options = {key: value for key, value in run.summary["config"].items() if key in groups}
    return Settings(options, {key: written.get(key) for key in keys}, {key: _plain(resolved[key]) for key in keys})


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 1.0 and 1 are one setting


def shown_keys(settings: Sequence[Settings], differing: Sequence[str]) -> list[str]:
    """The keys that name a group: chosen options, and values that runs of one option of their config group differ in.

    A value that follows another key by interpolation is not shown.
    """
    options = [key for key in _keys(s.options for s in settings) if _differs(key, (s.options for s in settings))]

    def shown(key: str) -> bool:
        of_option: dict[Any, list[Settings]] = {}
        for own in settings:
            of_option.setdefault(own.options.get(key.partition(".")[0]), []).append(own)
        return any(
            _differs(key, (s.written for s in alike)) and _differs(key, (s.resolved for s in alike))
            for alike in of_option.values()
        )

    return [*options, *(key for key in differing if shown(key))]


def _keys(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _differs(key: str, mappings: Iterable[Mapping[str, Any]]) -> bool:
    return len({json.dumps(mapping.get(key), sort_keys=True) for mapping in mappings}) > 1


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def describe(group: Group, reference: Group) -> dict[str, Any]:
    """Means over the seeds of a group, and its difference to the reference group, seed by seed."""
    final = {run.seed: run.summary["final_reward"] for run in group.runs}
    theirs = {run.seed: run.summary["final_reward"] for run in reference.runs}
    paired = {} if group is reference else {seed: final[seed] - theirs[seed] for seed in final if seed in theirs}
    return {
        "group": group.name,
        "settings": group.settings,
        "seeds": list(final),
        "base": _summarised(group, lambda s: s["base_reward"]),
        "final": _summarised(group, lambda s: s["final_reward"]),
        "improvement": _summarised(group, lambda s: s["improvement"]),
        "seconds_per_iteration": _summarised(group, _seconds),
        "spearman_first": _summarised(group, lambda s: _probe(s, "first")),
        "spearman_last": _summarised(group, lambda s: _probe(s, "last")),
        "against": None if group is reference else reference.name,
        "difference": mean_of(list(paired.values()))._asdict() if paired else None,
        "difference_per_seed": {str(seed): value for seed, value in paired.items()},
        "runs": [run.folder for run in group.runs],
    }


def _seconds(summary: Mapping[str, Any]) -> float | None:
    return summary["seconds_per_stage"].get("iteration", {}).get("median")


def _probe(summary: Mapping[str, Any], which: str) -> float | None:
    return ((summary["rank_fidelity"] or {}).get(which) or {}).get("spearman")


def _summarised(group: Group, read: Callable[[Mapping[str, Any]], float | None]) -> dict[str, float | None] | None:
    """Mean and sample standard deviation over the runs of a group that have the value; None if none has it."""
    values = [value for run in group.runs if (value := read(run.summary)) is not None]
    if not values:
        return None
    mean = mean_of(values)
    return {"mean": mean.mean, "std": mean.std}


def format_comparison(result: Mapping[str, Any], folder: Path) -> str:
    columns = ["group", "seeds", "base", "final", "improvement", "s/iteration", "spearman", "final - first group"]
    rows = []
    for group in result["groups"]:
        first, last = group["spearman_first"], group["spearman_last"]
        rank = f"{first['mean']:.3f} to {last['mean']:.3f}" if first and last else None
        seconds = group["seconds_per_iteration"]
        rows.append(
            [
                group["group"],
                len(group["seeds"]),
                _spread(group["base"]),
                _spread(group["final"]),
                _spread(group["improvement"]),
                f"{seconds['mean']:.2f}" if seconds else None,
                rank,
                _paired(group["difference"], len(group["difference_per_seed"])),
            ]
        )
    lines = [f"{result['reward']} reward, mean +- standard deviation over seeds", format_table(columns, rows)]
    if len(rows) > 1:
        lines.append(f"  first group: {rows[0][0]}; differences seed by seed, in brackets the 95 % confidence interval")
    if any(len(group["seeds"]) == 1 for group in result["groups"]):
        lines.append(
            "  a group of one seed has no deviation and no interval, so its difference may be chance; train with more "
            "seeds: -m seed=1,2,3"
        )
    lines += [f"  left out {run}: {reason}" for run, reason in result["left_out"].items()]
    return "\n".join([*lines, f"  {folder / 'compare.json'}, {folder / 'compare.png'}"])


def _spread(values: Mapping[str, float | None] | None) -> str | None:
    if values is None:
        return None
    return f"{values['mean']:.4f}" + (f" +- {values['std']:.4f}" if values["std"] is not None else "")


def _paired(difference: Mapping[str, float | None] | None, seeds: int) -> str | None:
    if difference is None:
        return None
    interval = f" [{difference['low']:+.4f}, {difference['high']:+.4f}]" if seeds > 1 else ""
    return f"{difference['mean']:+.4f}{interval} over {seeds}"


def learning_curve(run: Run) -> dict[int, float]:
    """iteration -> held-out reward."""
    reward = run.summary["reward"]
    return {row["iteration"]: row[reward] for row in run.summary["evaluations"] if row.get(reward) is not None}


def draw_curves(groups: Sequence[Group], reward: str) -> bytes:
    """PNG of learning curves: a thin line per seed, and a thick line per group, the mean at common evaluations."""
    figure = Figure(figsize=(8, 5 + 0.2 * len(groups)), layout="constrained")
    axes = figure.subplots()
    for number, group in enumerate(groups):
        colour = f"C{number % 10}"
        curves = [learning_curve(run) for run in group.runs]
        for curve in curves:
            axes.plot(list(curve), list(curve.values()), color=colour, linewidth=0.8, alpha=0.5)
        common = sorted(set(curves[0]).intersection(*curves))
        mean = [fmean(curve[iteration] for curve in curves) for iteration in common]
        seeds = f"({len(curves)} seed{'s' if len(curves) > 1 else ''})"
        label = f"{textwrap.shorten(group.name, 100, placeholder=' …')} {seeds}"
        axes.plot(common, mean, color=colour, linewidth=2.5, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("iteration")
    axes.set_ylabel(f"held-out {reward} reward")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
