"""Learning curves of groups of runs, and their picture: reward against iterations, seconds and model evaluations."""

import io
import textwrap
from collections.abc import Sequence
from itertools import cycle
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from solrl_lightning.finished_runs import Run
from solrl_lightning.metrics.time_to_reward import GroupCurve

COSTS = ("iteration", "seconds", "evaluations")
"""Keys of an evaluation's row that measure what was spent until then."""

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D")  # Okabe and Ito; the last ours
_REFERENCE = "#333333"
_STYLES = ("-", "--", ":", "-.")  # one for every round of the colours
_WIDTH, _DPI = 10, 160  # inches, pixels per inch: text is legible at half the size
_TITLE, _LEGEND = 110, 128  # characters in a row
_HOURS_FROM = 10_000  # seconds


class Line(NamedTuple):
    """A group in the picture."""

    label: str
    curves: dict[str, GroupCurve]  # by cost
    reached: dict[str, float | None]  # by cost, where the mean reaches the target
    is_reference: bool


def learning_curve(run: Run) -> dict[int, float]:
    """Return iteration -> held-out reward."""
    reward = run.summary["reward"]
    return {row["iteration"]: row[reward] for row in run.summary["evaluations"] if row.get(reward) is not None}


def costs(run: Run, cost: str) -> dict[int, float]:
    """Return iteration -> cost of the evaluations in the learning curve; empty unless all of them have it.

    A run that an older version began counts its cost from its resume, and its first evaluations have none.
    """
    curve = learning_curve(run)
    spent = {row["iteration"]: row.get(cost) for row in run.summary["evaluations"] if row["iteration"] in curve}
    known = {iteration: value for iteration, value in spent.items() if value is not None}
    return known if len(known) == len(curve) else {}


def group_curve(runs: Sequence[Run], cost: str) -> GroupCurve | None:
    """Return the curve of the runs that have a cost, one per seed; None without such runs or common evaluations."""
    known = [(run.seed, learning_curve(run), spent) for run in runs if (spent := costs(run, cost))]
    if not known:
        return None
    common = sorted(set.intersection(*(set(spent) for _, _, spent in known)))
    if not common:
        return None
    means = [fmean(spent[iteration] for _, _, spent in known) for iteration in common]
    return GroupCurve(means, [{seed: curve[iteration] for seed, curve, _ in known} for iteration in common])


def draw_curves(lines: Sequence[Line], reward: str, target: float) -> bytes:
    """Return a PNG file with a panel for every cost that a run has: the mean of each group, and the range of its seeds.

    With several groups, a dashed line shows the reward ``target``, and dots where the means reach it.
    """
    panels = [cost for cost in COSTS if any(cost in line.curves for line in lines)]
    labels = {id(line): textwrap.fill(_legend(line, lines), _LEGEND) for line in lines}
    columns = max(1, min(4, len(lines), _LEGEND // (max(map(len, labels.values())) + 4)))
    height = 3.9 + 0.2 * -(-len(lines) // columns)
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    looks = cycle((colour, style) for style in _STYLES for colour in _COLOURS)
    handles: dict[int, Line2D] = {}
    for line in lines:
        colour, style = (_REFERENCE, "-") if line.is_reference and len(lines) > 1 else next(looks)
        for panel, cost in zip(axes, panels, strict=True):
            if cost in line.curves:
                drawn = _draw_line(panel, line.curves[cost], cost_scale(lines, cost), colour, style)
                handles.setdefault(id(line), drawn)
                if len(lines) > 1 and (at := line.reached.get(cost)) is not None:
                    panel.scatter([at / cost_scale(lines, cost)], [target], 50, colour, edgecolors="white", zorder=4)
    for panel, cost in zip(axes, panels, strict=True):
        _label_axis(panel, cost, cost_scale(lines, cost))
        if len(lines) > 1:
            panel.axhline(target, color=_REFERENCE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes[0].set_ylabel(f"held-out {reward} reward", fontsize=11)
    title = _title(lines, reward)
    if len(lines) > 1:
        reference = next(line.label for line in lines if line.is_reference)
        note = f"dashed: {target:.4f}, the final reward of {reference}; the legend has the time to it and the speed-up"
        title += "\n" + textwrap.fill(note, _TITLE)
    figure.suptitle(title, fontsize=11)
    ordered = sorted((line for line in lines if id(line) in handles), key=_rank)
    figure.legend(
        [handles[id(line)] for line in ordered],
        [labels[id(line)] for line in ordered],
        loc="outside lower center",
        ncols=columns,
        fontsize=9.5,
        frameon=False,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_line(panel: Axes, curve: GroupCurve, scale: float, colour: str, style: str) -> Line2D:
    at = [cost / scale for cost in curve.cost]
    rewards = [list(rewards.values()) for rewards in curve.rewards]
    panel.fill_between(at, [*map(min, rewards)], [*map(max, rewards)], color=colour, alpha=0.12, linewidth=0)
    marker = "o" if len(at) == 1 else None
    return panel.plot(at, [*map(fmean, rewards)], style, color=colour, linewidth=2, zorder=3, marker=marker)[0]


def _label_axis(panel: Axes, cost: str, scale: float) -> None:
    seconds = "hours of training" if scale > 1 else "seconds of training"
    names = {"iteration": "iterations", "seconds": seconds, "evaluations": "model evaluations"}
    panel.set_xlabel(names[cost], fontsize=11)
    panel.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=cost == "iteration"))
    if cost == "evaluations":
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.set_xlim(left=0)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def cost_scale(lines: Sequence[Line], cost: str) -> float:
    """Divisor of a cost for its axis: 3600 for many seconds, which are shown in hours."""
    longest = max(line.curves[cost].cost[-1] for line in lines if cost in line.curves)
    return 3600 if cost == "seconds" and longest > _HOURS_FROM else 1


def _legend(line: Line, lines: Sequence[Line]) -> str:
    if len(lines) == 1 or "seconds" not in line.curves:
        return line.label
    seconds = line.reached["seconds"]
    if seconds is None:
        return f"{line.label}: not reached"
    reference = next(other for other in lines if other.is_reference).reached.get("seconds")
    factor = "" if not seconds or reference is None or line.is_reference else f", {reference / seconds:.2f}x"
    spent = f"{seconds / 3600:,.1f} h" if cost_scale(lines, "seconds") > 1 else f"{seconds:,.0f} s"
    return f"{line.label}: {spent}{factor}"


def _rank(line: Line) -> float:
    seconds = line.reached.get("seconds")
    return float("inf") if seconds is None else seconds


def _title(lines: Sequence[Line], reward: str) -> str:
    counts = sorted({len(line.curves["iteration"].rewards[0]) for line in lines if "iteration" in line.curves})
    if counts[-1:] in ([], [1]):
        return f"{reward} reward on held-out prompts"
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{reward} reward on held-out prompts: mean and range of {number} seeds"
