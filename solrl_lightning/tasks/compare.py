"""task=compare: final rewards of finished runs, and the cost at which each group reaches a reference group's plateau.

At equal seeds groups share prompts, initial adapters and evaluation noise, so their difference is taken seed by seed.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from solrl_lightning.artifacts.files import write_atomically
from solrl_lightning.artifacts.finished_runs import finished_runs
from solrl_lightning.artifacts.formatting import counted, measured, number, numbers
from solrl_lightning.artifacts.tables import format_table, write_json
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Compare
from solrl_lightning.study.confidence import mean_of
from solrl_lightning.study.drawing import cost_axis
from solrl_lightning.study.elsewhere import read_cost, simulated_iteration, with_simulated
from solrl_lightning.study.learning_curves import curve_chart, difference_chart, draw_curves, known_costs
from solrl_lightning.study.report import Page, Section, Table, Tile, render
from solrl_lightning.study.run_groups import COSTS, SIMULATED, Group, costs, group_runs
from solrl_lightning.study.time_to_reward import POINTS, cost_to_reach, speed_up

_LEVELLED_OFF = 0.05  # rise within the last third of a run, as a share of its progress, below which it stands still
_BASELINE = "diffusionnft"  # the group of this family is the reference unless task.reference names another


def compare(cfg: Run) -> dict[str, Any]:
    """Print the tables of the runs that match ``cfg.task.runs``; write compare.json, compare.png and report.html.

    Raises:
        UserError: no run matches, none of them is finished, their rewards differ, or no group has the words of
            ``cfg.task.reference``.
    """
    task = cfg.task_as(Compare)
    cost = None if task.cost is None else read_cost(task.cost)
    runs, left_out = finished_runs(task.runs)
    rewards = {run.summary["reward"]: run.folder for run in reversed(runs)}  # with the first folder of each
    if len(rewards) > 1:
        each = ", ".join(f"{name} (in {folder})" for name, folder in rewards.items())
        raise UserError(
            f"task.runs={task.runs} is invalid: its runs have different rewards, {each}, which do not compare. Set a "
            "glob that matches the folders of one."
        )
    groups, superseded = group_runs(runs if cost is None else with_simulated(runs, cost))
    reference = choose_reference(groups, task.reference)
    result = {
        "runs": task.runs,
        "reward": runs[0].summary["reward"],
        "reference": reference.name,
        **describe_plateau(reference),
        "simulated": cost and {"note": cost.note, "machine": cost.machine and cost.machine._asdict()},
        "held_out_sets": _sets([run.summary["held_out"] for run in runs if "held_out" in run.summary]),
        "groups": [describe(group, reference) for group in groups],
        "left_out": left_out | superseded,
    }
    folder, sections = Path(cfg.run_dir), tables(result)
    write_json(folder / "compare.json", result)
    write_atomically(folder / "compare.png", draw_curves(groups, result))
    write_atomically(folder / "report.html", render(study_page(result, groups, sections)))
    print("\n\n".join(map(format_section, sections)))
    print("  " + ", ".join(str(folder / name) for name in ("report.html", "compare.json", "compare.png")))
    return result


def choose_reference(groups: Sequence[Group], wanted: Any) -> Group:
    """Return the group of the shortest name with all words of ``wanted``, each ``key=value`` or a value alone.

    With ``wanted=None`` it is the first group of family=diffusionnft, else the first group. UserError if no group has
    the words.
    """
    if wanted is None:
        return next((g for g in groups if g.runs[0].summary["config"]["family"] == _BASELINE), groups[0])
    words = [{part for word in group.name.split() for part in (word, word.partition("=")[2])} for group in groups]
    fitting = [group for group, of_group in zip(groups, words, strict=True) if of_group.issuperset(str(wanted).split())]
    if fitting:
        return min(fitting, key=lambda group: len(group.name.split()))
    raise UserError(
        f"task.reference={wanted} is invalid: it takes words of the name of a group, and the groups are "
        f"{'; '.join(group.name for group in groups)}. Use 'task.reference=\"{groups[0].name}\"'."
    )


def describe_plateau(reference: Group) -> dict[str, Any]:
    """Return means over the seeds of base and plateau, and whether the curve has levelled off.

    ``rise`` is that within the last third, as a share of the progress; None if it, and ``levelled_off``, are not known.
    """
    plateaus = reference.plateaus.values()
    base, level = fmean(each.base for each in plateaus), fmean(each.level for each in plateaus)
    rises = [each.rise for each in plateaus if each.rise is not None]
    rise = fmean(rises) / (level - base) if rises and level > base else None
    return {
        "plateau": level,
        "base": base,
        "rise": rise,
        "levelled_off": None if rise is None else rise < _LEVELLED_OFF,
    }


def describe(group: Group, reference: Group) -> dict[str, Any]:
    """Return means over the seeds of a group, and its differences and its speed-up to the reference group."""
    final, theirs, plateaus = group.finals, reference.finals, reference.plateaus
    compared = [] if group is reference else [seed for seed in final if seed in theirs]
    paired = {seed: final[seed] - theirs[seed] for seed in compared}
    above = [group.plateaus[seed].level - plateaus[seed].level for seed in compared]
    summaries = [run.summary for run in group.runs]
    ranks = [s["rank_fidelity"] or {} for s in summaries]
    spearman = {at: _mean((each.get(at) or {}).get("spearman") for each in ranks) for at in ("first", "last")}
    return {
        "group": group.name,
        "settings": group.settings,
        "seeds": list(final),
        "base": _mean(s["base_reward"] for s in summaries),
        "final": _mean(final.values()),
        "improvement": _mean(s["improvement"] for s in summaries),
        "seconds_per_iteration": _mean(s["seconds_per_stage"].get("iteration", {}).get("median") for s in summaries),
        "simulated_seconds_per_iteration": simulated_iteration(group),
        "spearman_first": spearman["first"],
        "spearman_last": spearman["last"],
        "against": None if group is reference else reference.name,
        "difference": mean_of(list(paired.values()))._asdict() if paired else None,
        "difference_per_seed": {str(seed): value for seed, value in paired.items()},
        "above_plateau": mean_of(above)._asdict() if above else None,
        "to_reference": {
            cost: describe_cost(group, reference, cost)
            for cost in COSTS
            if cost != SIMULATED or cost in reference.curves
        },
        "runs": [run.folder for run in group.runs],
    }


def describe_cost(group: Group, reference: Group, cost: str) -> dict[str, Any]:
    """Return the cost at which a group reaches each of ``POINTS`` of the reference's progress.

    There are no points if no run records the cost, or the reference made no progress. A cost is None where it is beyond
    ``spent``, the cost of the last evaluation.
    """
    seeds = {run.seed for run in group.runs}
    points, plateaus = {}, {seed: each for seed, each in reference.plateaus.items() if seed in seeds}
    plateaus = plateaus or reference.plateaus
    progress = fmean(each.level - each.base for each in plateaus.values())
    for percent in POINTS if cost in group.curves and progress > 0 else ():
        targets = {seed: each.reward_at(percent) for seed, each in plateaus.items()}
        reached, factor = cost_to_reach(group.curves[cost], targets), None
        if group is not reference and cost in reference.curves:
            factor = speed_up(reached, cost_to_reach(reference.curves[cost], targets))
        points[str(percent)] = reached._asdict() | {"speed_up": factor}
    return {"points": points, "unknown": [run.folder for run in group.runs if not costs(run, cost)]}


def _mean(values: Iterable[float | None]) -> dict[str, float | None] | None:
    """Return the mean and sample standard deviation of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return {"mean": mean_of(known).mean, "std": mean_of(known).std} if known else None


def _sets(held_out: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of different evaluations; older runs have not recorded all of what decides them."""
    keys = dict.fromkeys(key for each in held_out for key in each)
    return max((len({each[key] for each in held_out if key in each}) for key in keys), default=0)


def tables(result: Mapping[str, Any]) -> list[Section]:
    """Return the tables, each with heading and notes: final rewards and, of several groups, costs to the plateau."""
    groups, several = result["groups"], len(result["groups"]) > 1
    notes = [f"mean held-out {result['reward']} reward ± standard deviation over seeds"]
    if several:
        notes.append(
            f"reference: {result['reference']}; differences are taken seed by seed, in brackets the 95 % confidence "
            "interval (Student's t)"
        )
    if any(len(group["seeds"]) == 1 for group in groups):
        notes.append(
            "a group of one seed has no deviation and no interval, so its difference may be chance; train with more "
            "seeds: -m seed=1,2,3"
        )
    if result["held_out_sets"] > 1:
        notes.append(
            "the groups were evaluated on different held-out images, or by rewards with other weights or arguments, so "
            "they do not compare"
        )
    if result["simulated"] is not None:
        each = (f"{group['group']} {group['simulated_seconds_per_iteration']:.3g}" for group in groups)
        notes += [result["simulated"]["note"], f"simulated seconds of an iteration: {', '.join(each)}"]
    notes += [f"left out {run}: {reason}" for run, reason in result["left_out"].items()]
    sections = [Section("Final rewards", notes, tables=[final_rewards(groups)])]
    if several:
        known = [
            cost for cost in groups[0]["to_reference"] if any(group["to_reference"][cost]["points"] for group in groups)
        ]
        costs = [costs_to_plateau(result, cost) for cost in known[1:] or known]  # iterations if nothing else
        first = costs[0] if costs else sections.pop()
        sections += [first._replace(text=[*first.text, *plateau_notes(result)]), *costs[1:]]
    return sections


def final_rewards(groups: Sequence[Mapping[str, Any]]) -> Table:
    columns = ["group", "seeds", "final", "final - reference", "improvement", "before", "s/iteration", "spearman"]
    rows = []
    for group in groups:
        first, last, seconds = group["spearman_first"], group["spearman_last"], group["seconds_per_iteration"]
        paired = _paired(group["difference"])
        rows.append(
            [
                group["group"],
                len(group["seeds"]),
                _spread(group["final"]),
                paired and f"{paired} over {len(group['difference_per_seed'])}",
                _spread(group["improvement"]),
                _spread(group["base"]),
                f"{seconds['mean']:.2f}" if seconds else None,
                " to ".join(numbers([first["mean"], last["mean"]], 3)) if first and last else None,
            ]
        )
    return Table(columns, rows)


def costs_to_plateau(result: Mapping[str, Any], cost: str) -> Section:
    reached = [group["to_reference"][cost]["points"] for group in result["groups"]]
    label, scale = cost_axis(cost, max(point["spent"] for points in reached for point in points.values()))
    rows = [
        [
            group["group"],
            *(_amount(points.get(str(percent)), scale) for percent in POINTS),
            _factor(points.get(str(POINTS[-1]))),
            _paired(group["above_plateau"]),
        ]
        for group, points in zip(result["groups"], reached, strict=True)
    ]
    columns = ["group", *(f"{percent} %" for percent in POINTS), "speed-up at 100 %", "above the plateau"]
    title = f"{label[0].upper()}{label[1:]} to the plateau of the reference"
    return Section(title, [f"{label} to a share of the reference's progress"], tables=[Table(columns, rows)])


def plateau_notes(result: Mapping[str, Any]) -> list[str]:
    """Return sentences on the meaning of shares, on whether the reference levels off, and on runs without a cost."""
    base, level, rise = result["base"], result["plateau"], result["rise"]
    before, reached = numbers([base, level])
    notes = [
        f"progress: from {before} before training to {reached}, the plateau: the mean of its last third",
        "without evaluations, probes and sample grids; in brackets the 95 % interval; > and <: beyond the run",
    ]
    if len({frozenset(group["seeds"]) for group in result["groups"]}) > 1:
        notes.append("shares of progress are of the seeds that a group has in common with the reference, if any")
    if level <= base:
        notes.append("the reference ends no higher than it began; name another one with task.reference=<group>")
    elif rise is None:
        notes.append(
            "its last third has one evaluation, so whether the reference has levelled off is unknown; train longer, by "
            "max_seconds or iterations, or lower evaluation.every if it is above 1"
        )
    elif not result["levelled_off"]:
        notes.append(
            f"the reference still rises, by {rise:.0%} of its progress within its last third; train longer, by "
            "max_seconds or iterations"
        )
    for group in result["groups"]:
        if unknown := group["to_reference"]["seconds"]["unknown"]:
            notes.append(f"without seconds and forward passes (of an older version): {', '.join(unknown)}")
    return notes


def format_section(section: Section) -> str:
    """Format a section's table as text, under its first line and above the others."""
    (heading, *notes), (table,) = section.text, section.tables
    return "\n".join([heading, format_table(table.columns, table.rows), *(f"  {note}" for note in notes)])


def study_page(result: Mapping[str, Any], groups: Sequence[Group], sections: Sequence[Section]) -> Page:
    runs = [[run.folder, group.name, run.seed] for group in groups for run in group.runs]
    tiles = [
        Tile("groups", str(len(groups)), counted(len(runs), "run")),
        highest_tile(groups),
        Tile("plateau of the reference", number(result["plateau"]), result["reference"]),
    ]
    reference = next(group for group in groups if group.name == result["reference"])
    differences = difference_chart(groups, reference, result["reward"]) if len(groups) > 1 else None
    bands = "." if len(groups) > 1 else ", bands the range of the seeds."
    curves = Section(
        "Learning curves",
        [
            f"Lines are means over the seeds that have an evaluation{bands}",
            *([] if result["simulated"] is None else [_as_sentence(result["simulated"]["note"])]),
        ],
        charts=[*filter(None, [differences]), *(curve_chart(groups, cost, result) for cost in known_costs(groups))],
    )
    table = Table(["folder", "group", "seed"], runs, folded=f"All {len(runs)} runs", is_text=True)
    final, *cost = [section._replace(text=[*map(_as_sentence, section.text)]) for section in sections]
    return Page(
        f"Study: {result['reward']} reward",
        f"{counted(len(runs), 'finished run')} of {result['runs']}, grouped by all that differs except the seed.",
        tiles if len(groups) > 1 else tiles[:2],
        [final, curves, *cost, Section("Runs", tables=[table])],
    )


def highest_tile(groups: Sequence[Group]) -> Tile:
    """Return the highest final reward; of a group only where its seed-by-seed intervals above all others exclude 0."""
    best, *others = sorted(groups, key=lambda group: -fmean(group.finals.values()))
    value = number(fmean(best.finals.values()))
    gaps = [
        [best.finals[seed] - other.finals[seed] for seed in best.finals if seed in other.finals] for other in others
    ]
    lows = [mean_of(gap).low if gap else None for gap in gaps]
    if all(low is not None and low > 0 for low in lows):
        return Tile("highest final reward", value, best.name)
    why = "an interval of the differences has 0" if None not in lows else "one seed has no interval"
    return Tile("highest final reward", value, f"of no group for certain: {why}")


def _as_sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}."


def _amount(cost: Mapping[str, Any] | None, scale: float) -> str | None:
    if cost is None:
        return None
    digits = 0 if scale == 1 else 1
    mean, low, high, spent = (
        None if cost[key] is None else f"{cost[key] / scale:,.{digits}f}" for key in ("mean", "low", "high", "spent")
    )
    if mean is None:
        return f"not reached after {spent}"
    return mean if cost["interval"] is None else f"{mean} [{low}, {high or f'> {spent}'}]"


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
    return None if values is None else measured(values["mean"], values["std"])


def _paired(difference: Mapping[str, float | None] | None) -> str | None:
    if difference is None:
        return None
    mean, low, high = numbers([difference[key] for key in ("mean", "low", "high")], 3, signed=True)
    return mean if difference["low"] is None else f"{mean} [{low}, {high}]"
