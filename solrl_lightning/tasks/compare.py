"""task=compare: final rewards of finished runs, and the cost at which each group reaches that of a reference group.

Runs are grouped by their resolved configurations, without the seed and keys that only observe or place a run. Two
groups share prompts, initial adapters and evaluation noise at equal seeds, so their difference is taken seed by seed.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf

from solrl_lightning import __version__
from solrl_lightning.errors import UserError
from solrl_lightning.files import write_atomically
from solrl_lightning.finished_runs import RECORDED_CONFIG, Run, finished_runs
from solrl_lightning.metrics.confidence import mean_of
from solrl_lightning.metrics.time_to_reward import Reached, cost_to_reach, first_reached, rewards_at, speed_up
from solrl_lightning.report import Chart, Page, Section, Table, Tile, legend_of, render
from solrl_lightning.resume import is_subkey, leaves
from solrl_lightning.run_folder import RECORD
from solrl_lightning.svg_charts import Series, draw_lines
from solrl_lightning.tasks.learning_curves import (
    COSTS,
    Line,
    cost_scale,
    costs,
    draw_curves,
    group_curve,
    learning_curve,
)
from solrl_lightning.tasks.tables import format_table, write_json

# Keys, with those below them, in which runs of one experiment may differ.
_SAME_EXPERIMENT = (
    "seed",
    "objective.seed",
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


_BASELINE = "family=diffusionnft"  # its group is the reference unless task.reference names another


class Group(NamedTuple):
    """Finished runs that differ in their seed only, one per seed."""

    words: tuple[str, ...]  # key=value; chosen options before single values
    usual: tuple[str, ...]  # further words that most groups have
    label: str  # the words in short, unique
    runs: list[Run]
    settings: dict[str, Any]  # what differs between the groups, followers of other keys included

    @property
    def name(self) -> str:
        return " ".join(self.words) or "all"

    @property
    def finals(self) -> dict[Any, float]:
        """Seed -> final held-out reward."""
        return {run.seed: run.summary["final_reward"] for run in self.runs}


class Settings(NamedTuple):
    """The configuration that identifies an experiment: dotted key -> value."""

    options: dict[str, Any]  # config group -> the option chosen of it
    written: dict[str, Any]  # with interpolations as they are
    resolved: dict[str, Any]
    given: set[str]  # keys on the command line of the run


def compare(cfg: DictConfig) -> dict[str, Any]:
    """Print the tables of the runs that match ``cfg.task.runs``.

    Writes compare.json, compare.png (learning curves) and report.html.

    Raises:
        UserError: no run matches, none of them is finished, or no group has the words of ``cfg.task.reference``.
    """
    runs, left_out = finished_runs(cfg.task.runs)
    groups, superseded = group_runs(runs)
    left_out |= superseded
    reference = choose_reference(groups, cfg.task.reference)
    seconds = equal_seconds(groups)
    result = {
        "runs": cfg.task.runs,
        "reward": runs[0].summary["reward"],
        "reference": reference.name,
        "target": fmean(reference.finals.values()),
        "usual": list(dict.fromkeys(word for group in groups for word in group.usual)),
        "equal_seconds": seconds,
        "held_out_sets": len({json.dumps(run.summary.get("held_out")) for run in runs if "held_out" in run.summary}),
        "groups": [describe(group, reference, seconds) for group in groups],
        "left_out": left_out,
    }
    folder = Path(cfg.run_dir)
    write_json(folder / "compare.json", result)
    lines = [line_of(group, reference) for group in groups]
    write_atomically(folder / "compare.png", draw_curves(lines, result["reward"], result["target"]))
    write_atomically(folder / "report.html", render(study_page(result, lines)))
    print(format_comparison(result, folder))
    return result


def choose_reference(groups: Sequence[Group], wanted: Any) -> Group:
    """Return the group of the shortest name that has all words of ``wanted``, each ``key=value`` or a value alone.

    With ``wanted=None`` it is that of family=diffusionnft, else the first group.

    Raises:
        UserError: no group has the words.
    """
    words = _BASELINE.split() if wanted is None else str(wanted).split()
    known = [{part for word in group.name.split() for part in (word, word.partition("=")[2])} for group in groups]
    fitting = [group for group, own in zip(groups, known, strict=True) if own.issuperset(words)]
    if fitting or wanted is None:
        return min(fitting, key=lambda group: len(group.words), default=groups[0])
    raise UserError(
        f"task.reference={wanted} is invalid: it takes words of the name of a group, and the groups are "
        f"{'; '.join(group.name for group in groups)}. Use 'task.reference=\"{groups[0].name}\"'."
    )


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], dict[str, str]]:
    """Groups in the order of their first run, and runs that a later one of the same group and seed replaces."""
    settings = [read_settings(run) for run in runs]
    differing = [key for key in _keys(s.resolved for s in settings) if _differs(key, (s.resolved for s in settings))]
    members: dict[str, dict[Any, Run]] = {}
    distinct: dict[str, Settings] = {}
    superseded = {}
    for run, own in zip(runs, settings, strict=True):
        identity = json.dumps(own.resolved, sort_keys=True)
        earlier = members.setdefault(identity, {}).get(run.seed)
        if earlier is not None and (earlier.summary["status"], run.summary["status"]) == ("completed", "stopped early"):
            superseded[run.folder] = (
                f"stopped early; {earlier.folder} has the same configuration and seed and completed"
            )
            continue
        if earlier is not None:
            superseded[earlier.folder] = f"{run.folder} is a later run of the same configuration and seed"
        members[identity][run.seed] = run
        distinct.setdefault(identity, own)
    values = {identity: name_values(own, settings, differing) for identity, own in distinct.items()}
    full = {identity: tuple(f"{key}={value}" for key, value in own.items()) for identity, own in values.items()}
    words = without_usual(full)
    groups = []
    for identity, own in distinct.items():
        usual = tuple(word for word in full[identity] if word not in words[identity])
        label = " ".join(_short(word, own.options) for word in words[identity]) or "all"
        shown = {key: own.resolved.get(key) for key in differing}
        groups.append(Group(words[identity], usual, label, list(members[identity].values()), shown))
    if len({group.label for group in groups}) < len(groups):
        groups = [group._replace(label=group.name) for group in groups]
    return groups, superseded


def without_usual(words: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the words of each group without those after the first that more than half of the groups have."""
    number = Counter(word for own in words.values() for word in own)
    rare = {word for word, count in number.items() if count <= len(words) / 2}
    fewer = {group: (*own[:1], *(word for word in own[1:] if word in rare)) for group, own in words.items()}
    return fewer if len(set(fewer.values())) == len(fewer) else dict(words)


def _short(word: str, options: Mapping[str, Any]) -> str:
    key, _, value = word.partition("=")
    return value if key in options else f"{key.rpartition('.')[2]}={value}"


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
    values = {key: written.get(key) for key in keys}, {key: _plain(resolved[key]) for key in keys}
    overrides = Path(run.folder) / RECORD / "overrides.yaml"
    arguments = yaml.safe_load(overrides.read_text()) if overrides.is_file() else []
    return Settings(options, *values, {str(argument).partition("=")[0].lstrip("+~") for argument in arguments})


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 1.0 and 1 are one setting


def name_values(own: Settings, settings: Sequence[Settings], differing: Sequence[str]) -> dict[str, str]:
    """Return key -> value of what distinguishes a group: chosen options, then single values.

    A value distinguishes it if the runs with the same option of its config group differ in it, and if it does not
    follow another key by interpolation. A value of no config group that was not on the command line follows the option
    that sets it if the runs with the same option of some group agree in it.
    """
    options = [key for key in _keys(s.options for s in settings) if _differs(key, (s.options for s in settings))]

    def distinguishes(key: str) -> bool:
        group = key.partition(".")[0]
        follows = group not in own.options and not any(key in s.given for s in settings)
        for option in options if follows else [group]:
            alike = [s for s in settings if s.options.get(option) == own.options.get(option)]
            if not (_differs(key, (s.written for s in alike)) and _differs(key, (s.resolved for s in alike))):
                return False
        return True

    values = own.options | own.resolved
    keys = [*options, *(key for key in differing if distinguishes(key))]
    return {key: _value(values[key]) for key in keys if key in values}


def _keys(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _differs(key: str, mappings: Iterable[Mapping[str, Any]]) -> bool:
    return len({json.dumps(mapping.get(key), sort_keys=True) for mapping in mappings}) > 1


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def equal_seconds(groups: Sequence[Group]) -> float | None:
    """Return the seconds of training that all groups have been evaluated at; None if a group records no seconds."""
    curves = [group_curve(group.runs, "seconds") for group in groups]
    known = [curve.cost[-1] for curve in curves if curve is not None]
    return min(known) if len(known) == len(curves) else None


def describe(group: Group, reference: Group, seconds: float | None) -> dict[str, Any]:
    """Means over the seeds of a group, and its difference and its speed-up to the reference group."""
    curve = group_curve(group.runs, "seconds")
    at_seconds = None if curve is None or seconds is None else mean_of(rewards_at(curve, seconds))
    final, theirs = group.finals, reference.finals
    paired = {} if group is reference else {seed: final[seed] - theirs[seed] for seed in final if seed in theirs}
    return {
        "group": group.name,
        "settings": group.settings,
        "seeds": list(final),
        "base": _summarised(group, lambda s: s["base_reward"]),
        "final": _summarised(group, lambda s: s["final_reward"]),
        "improvement": _summarised(group, lambda s: s["improvement"]),
        "at_equal_seconds": None if at_seconds is None else {"mean": at_seconds.mean, "std": at_seconds.std},
        "seconds_per_iteration": _summarised(group, _seconds),
        "spearman_first": _summarised(group, lambda s: _probe(s, "first")),
        "spearman_last": _summarised(group, lambda s: _probe(s, "last")),
        "against": None if group is reference else reference.name,
        "difference": mean_of(list(paired.values()))._asdict() if paired else None,
        "difference_per_seed": {str(seed): value for seed, value in paired.items()},
        "to_reference": {cost: describe_cost(group, reference, cost) for cost in COSTS},
        "runs": [run.folder for run in group.runs],
    }


def describe_cost(group: Group, reference: Group, cost: str) -> dict[str, Any] | None:
    """Cost at which a group reaches the mean final reward of ``reference``; None if none of its runs records the cost.

    A cost is None where it is beyond ``spent``, that of the last evaluation. ``best`` is the highest reward of a seed.
    """
    reached = _reached(group, reference, cost)
    if reached is None:
        return None
    theirs = None if group is reference else _reached(reference, reference, cost)
    factor = None if theirs is None else speed_up(reached, theirs)
    target = fmean(reference.finals.values())
    per_seed = {}
    for run in group.runs:
        if spent := list(costs(run, cost).values()):
            rewards = list(learning_curve(run).values())
            at = first_reached(spent, [reward - target for reward in rewards])
            per_seed[str(run.seed)] = {"reached": at, "spent": spent[-1], "best": max(rewards)}
    return {
        **(reached._replace(low=None, high=None, interval=None) if group is reference else reached)._asdict(),
        "speed_up": None if factor is None else factor._asdict(),
        "per_seed": per_seed,
        "unknown": [run.folder for run in group.runs if not costs(run, cost)],
    }


def _reached(group: Group, reference: Group, cost: str) -> Reached | None:
    curve = group_curve(group.runs, cost)
    return None if curve is None else cost_to_reach(curve, reference.finals)


def line_of(group: Group, reference: Group) -> Line:
    """The group as the picture draws it."""
    curves = {cost: curve for cost in COSTS if (curve := group_curve(group.runs, cost)) is not None}
    reached = {cost: cost_to_reach(curve, reference.finals).mean for cost, curve in curves.items()}
    return Line(group.label, curves, reached, group is reference)


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
    columns, rows = final_rewards(result)
    lines = [f"{result['reward']} reward, mean +- standard deviation over seeds", format_table(columns, rows)]
    if result["usual"]:
        lines.append(f"  unless a name says otherwise: {' '.join(result['usual'])}")
    if len(rows) > 1:
        lines += [
            f"  reference: {result['reference']}; differences seed by seed, in brackets the 95 % confidence interval",
            "",
            _cost_title(result),
            format_table(*costs_to_reference(result)),
            f"  {_COST_NOTE}",
            *(f"  {note}" for note in cost_notes(result)),
        ]
    lines += [f"  {note}" for note in _general_notes(result)]
    files = ", ".join(str(folder / name) for name in ("report.html", "compare.json", "compare.png"))
    return "\n".join([*lines, f"  {files}"])


_COST_NOTE = "without evaluations, probes and sample grids; in brackets the 95 % interval; > and <: beyond the run"


def _cost_title(result: Mapping[str, Any]) -> str:
    return (
        f"training until the mean {result['reward']} reward is {result['target']:.4f}, the final one of the reference"
    )


def _general_notes(result: Mapping[str, Any]) -> list[str]:
    notes = [f"left out {run}: {reason}" for run, reason in result["left_out"].items()]
    if result["held_out_sets"] > 1:
        notes.insert(0, "the groups were evaluated on different held-out images, so their rewards do not compare")
    if any(len(group["seeds"]) == 1 for group in result["groups"]):
        notes.insert(
            0,
            "a group of one seed has no deviation and no interval, so its difference may be chance; train with more "
            "seeds: -m seed=1,2,3",
        )
    return notes


def final_rewards(result: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the table of final rewards."""
    columns = ["group", "seeds", "base", "final", "improvement", "s/iteration", "spearman", "final - reference"]
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
    return columns, rows


def costs_to_reference(result: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the table of costs to the reference's final reward."""
    columns = ["group", "seconds", "speed-up", "model evaluations", "fewer by"]
    equal = result["equal_seconds"]
    if equal is not None:
        columns.append(f"reward after {equal:,.0f} s")
    rows = []
    for group in result["groups"]:
        seconds, evaluations = (group["to_reference"][cost] for cost in ("seconds", "evaluations"))
        cells = [cell for cost in (seconds, evaluations) for cell in (_amount(cost), _factor(cost))]
        rows.append([group["group"], *cells, *([] if equal is None else [_spread(group["at_equal_seconds"])])])
    return columns, rows


def cost_notes(result: Mapping[str, Any]) -> list[str]:
    """Sentences on the runs that do not reach the reference's final reward, or do not record their cost."""
    notes = []
    for group in result["groups"]:
        seconds, iterations = (group["to_reference"][cost] for cost in ("seconds", "iteration"))
        by, unit = (seconds, " s") if seconds else (iterations, " iterations")
        missed = [
            f"seed {seed} after {own['spent']:,.0f}{unit}, {own['best']:.4f} at most"
            for seed, own in (by["per_seed"] if by else {}).items()
            if own["reached"] is None
        ]
        if missed:
            notes.append(f"not reached by {group['group']}: {'; '.join(missed)}")
        unknown = [run for run in group["runs"] if not seconds or run in seconds["unknown"]]
        if group["against"] is None and iterations and iterations["mean"] == 0:
            notes.append("the reference ends no higher than it began; name another one with task.reference=<group>")
        if unknown:
            notes.append(f"without seconds and model evaluations (of an older version): {', '.join(unknown)}")
    return notes


def study_page(result: Mapping[str, Any], lines: Sequence[Line]) -> Page:
    """The report of a study: final rewards and curves of every group, and the costs to the reference's final reward."""
    reward, groups = result["reward"], result["groups"]
    runs = [run for group in groups for run in group["runs"]]
    best = max(groups, key=lambda group: group["final"]["mean"])
    several = len(groups) > 1
    text = [f"{reward} reward on held-out prompts, mean ± standard deviation over seeds."]
    if result["usual"]:
        text.append(f"Unless a name says otherwise: {' '.join(result['usual'])}.")
    if several:
        text.append(
            f"Reference: {result['reference']}. Differences are taken seed by seed; in brackets the 95 % confidence "
            "interval (Student's t)."
        )
    sections = [
        Section(
            "Final rewards", [*text, *map(_as_sentence, _general_notes(result))], tables=[_shown(final_rewards(result))]
        ),
        Section(
            "Learning curves",
            ["Lines are means over the seeds that have an evaluation, bands the range of the seeds."],
            charts=[curve_chart(lines, cost, reward, result["target"]) for cost in COSTS if _has(lines, cost)],
        ),
    ]
    if several:
        notes = [_as_sentence(note) for note in (_cost_title(result), _COST_NOTE, *cost_notes(result))]
        sections.append(Section("Cost of the same reward", notes, tables=[_shown(costs_to_reference(result))]))
    rows = [
        [run, group["group"], str(seed)]
        for group in groups
        for run, seed in zip(group["runs"], group["seeds"], strict=True)
    ]
    sections.append(
        Section("Runs", tables=[Table(["folder", "group", "seed"], rows, folded=f"All {len(rows)} runs", is_text=True)])
    )
    tiles = [
        Tile("groups", str(len(groups)), f"{len(runs)} runs"),
        Tile("highest final reward", f"{best['final']['mean']:.4f}", best["group"]),
        Tile("final reward of the reference", f"{result['target']:.4f}", result["reference"]),
    ]
    lead = f"{len(runs)} finished runs of {result['runs']}, grouped by all that differs except the seed."
    return Page(
        f"Study: {reward} reward",
        lead,
        tiles if several else tiles[:2],
        sections,
        footer=f"solrl_lightning {__version__}",
    )


def curve_chart(lines: Sequence[Line], cost: str, reward: str, target: float) -> Chart:
    """The mean reward of each group against a cost, with the range of its seeds."""
    scale, names = cost_scale(lines, cost), {"iteration": "iterations", "evaluations": "model evaluations"}
    unit = names.get(cost, "hours of training" if scale > 1 else "seconds of training")
    drawn = []
    for line in lines:
        curve = line.curves.get(cost)
        x = [at / scale for at in curve.cost] if curve else []
        rewards = [list(rewards.values()) for rewards in curve.rewards] if curve else []
        drawn.append(Series(line.label, x, [*map(fmean, rewards)], [*map(min, rewards)], [*map(max, rewards)]))
    level = target if len(lines) > 1 else None
    svg = draw_lines(drawn, unit, whole_x=cost == "iteration", level=level)
    note = "dashed: the final reward of the reference" if level is not None else ""
    return Chart(f"{reward} reward by {unit}", svg, note, legend_of([line.label for line in lines]))


def _has(lines: Sequence[Line], cost: str) -> bool:
    return any(cost in line.curves for line in lines)


def _as_sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}."


def _shown(table: tuple[Sequence[str], Sequence[Sequence[Any]]]) -> Table:
    columns, rows = table
    cells = [["-" if cell is None else str(cell).replace("+-", "±") for cell in row] for row in rows]
    return Table(columns, cells)


def _amount(cost: Mapping[str, Any] | None) -> str | None:
    if cost is None:
        return None
    if cost["mean"] is None:
        return f"not reached after {cost['spent']:,.0f}"
    if cost["interval"] is None:
        return f"{cost['mean']:,.0f}"
    high = f"{cost['high']:,.0f}" if cost["high"] is not None else f"> {cost['spent']:,.0f}"
    return f"{cost['mean']:,.0f} [{cost['low']:,.0f}, {high}]"


def _factor(cost: Mapping[str, Any] | None) -> str | None:
    if cost is None or cost["speed_up"] is None:
        return None
    factor = cost["speed_up"]
    if cost["interval"] is None:
        return f"{factor['mean']:.2f}"
    within = factor["mean"] * cost["mean"] / cost["spent"]  # the factor of a group that reaches it at its end
    low = f"{factor['low']:.2f}" if factor["low"] is not None else f"< {within:.2f}"
    high = f"{factor['high']:.2f}" if factor["high"] is not None else "-"
    return f"{factor['mean']:.2f} [{low}, {high}]"


def _spread(values: Mapping[str, float | None] | None) -> str | None:
    if values is None:
        return None
    return f"{values['mean']:.4f}" + (f" +- {values['std']:.4f}" if values["std"] is not None else "")


def _paired(difference: Mapping[str, float | None] | None, seeds: int) -> str | None:
    if difference is None:
        return None
    interval = f" [{difference['low']:+.4f}, {difference['high']:+.4f}]" if seeds > 1 else ""
    return f"{difference['mean']:+.4f}{interval} over {seeds}"
