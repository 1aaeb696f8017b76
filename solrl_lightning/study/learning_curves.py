"""Learning curves of groups of runs, drawn: reward against iterations, seconds and forward passes."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from solrl_lightning.artifacts.formatting import number
from solrl_lightning.study.confidence import mean_of
from solrl_lightning.study.drawing import ITERATIONS, Chart, Series, cost_axis, draw_chart, plot, style_axes
from solrl_lightning.study.run_groups import COSTS, Group, learning_curve
from solrl_lightning.study.time_to_reward import POINTS

_WIDTH, _DPI = 10, 160  # inches, pixels per inch: text is legible at half the size
_TITLE, _LEGEND = 110, 128  # characters in a row
_DOTS = "dots: {}, {}, {} and {} % of the way to it".format(*POINTS)


def known_costs(groups: Sequence[Group]) -> list[str]:
    """Return the costs that a group has a curve of."""
    return [cost for cost in COSTS if any(cost in group.curves for group in groups)]


def series_of(groups: Sequence[Group], cost: str, result: Mapping[str, Any]) -> tuple[list[Series], str]:
    """Return the mean of each group with the range of its seeds against a cost, and the axis's label.

    Of several groups, dots mark where the mean reaches each of ``POINTS`` of the reference's progress.
    """
    label, scale = cost_axis(cost, max(group.curves[cost].cost[-1] for group in groups if cost in group.curves))
    several = len(groups) > 1
    series = []
    for group, facts in zip(groups, result["groups"], strict=True):
        curve = group.curves.get(cost)
        x = [at / scale for at in curve.cost] if curve else []
        seeds = [list(rewards.values()) for rewards in curve.rewards] if curve else []
        low, high = ([*map(limit, seeds)] for limit in (min, max))
        points = facts["to_reference"][cost]["points"] if several else {}
        means = [*map(fmean, seeds)]
        reached = [at["mean"] / scale for at in points.values() if at["mean"] is not None]
        dots = [(at, float(np.interp(at, x, means))) for at in reached]
        is_reference = group.name == result["reference"] and several
        series.append(Series(group.name, x, means, low, high, is_reference, dots))
    return series, label


def curve_chart(groups: Sequence[Group], cost: str, result: Mapping[str, Any]) -> Chart:
    """Return the chart of a cost for a page."""
    series, label = series_of(groups, cost, result)
    title = f"{result['reward']} reward by {label}"
    if len(groups) == 1:
        return draw_chart(title, series, label)
    lines = [line._replace(low=(), high=()) for line in series]  # `difference_chart` has the deviations that matter
    note = "dashed: the reference's plateau" + (f"; {_DOTS}" if any(line.dots for line in lines) else "")
    return draw_chart(title, lines, label, level=result["plateau"], note=note)


def difference_chart(groups: Sequence[Group], reference: Group, reward: str) -> Chart | None:
    """Return the chart of the groups' rewards minus the reference's, seed by seed, with their 95 % intervals.

    At the iterations after which both were evaluated; None if no group shares a seed with the reference.
    """
    series = []
    for group in groups:
        gaps = {} if group is reference else paired_gaps(group, reference)
        means = [mean_of(gap) for gap in gaps.values()]
        limits = [(mean.low, mean.high) for mean in means if mean.low is not None and mean.high is not None]
        low, high = map(list, zip(*limits, strict=True)) if limits else ([], [])
        series.append(Series(group.name, list(gaps), [mean.mean for mean in means], low, high, group is reference))
    if not any(line.x for line in series):
        return None
    note = "above the dashed line: better than the reference; band: 95 % interval (Student's t)"
    return draw_chart(f"{reward} reward minus the reference's, seed by seed", series, ITERATIONS, level=0.0, note=note)


def paired_gaps(group: Group, reference: Group) -> dict[float, list[float]]:
    """Return iteration -> difference to the reference of each seed that both have."""
    theirs = {run.seed: learning_curve(run) for run in reference.runs}
    curves = [(learning_curve(run), theirs[run.seed]) for run in group.runs if run.seed in theirs]
    if not curves:
        return {}
    common = set.intersection(*(set(a) & set(b) for a, b in curves))
    return {iteration: [a[iteration] - b[iteration] for a, b in curves] for iteration in sorted(common)}


def draw_curves(groups: Sequence[Group], result: Mapping[str, Any]) -> bytes:
    """Return a PNG file with a panel for every cost that a run has; ``result`` is the content of compare.json.

    With several groups, a dashed line shows the reference's plateau, and dots where the means reach the points on the
    way to it.
    """
    from matplotlib.figure import Figure

    several, panels = len(groups) > 1, known_costs(groups)
    longest = max((group.curves["seconds"].cost[-1] for group in groups if "seconds" in group.curves), default=0)
    reached = [_reached(facts, longest) for facts in result["groups"]]
    texts = [
        textwrap.fill(group.name + (text if several else ""), _LEGEND)
        for group, (_, text) in zip(groups, reached, strict=True)
    ]
    columns = max(1, min(4, len(groups), _LEGEND // (max(map(len, texts)) + 4)))
    height = 3.9 + 0.2 * -(-len(groups) // columns)
    width = _WIDTH * max(1, len(panels) / 3)
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    lines = []
    for panel, cost in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        series, label = series_of(groups, cost, result)
        style_axes(panel)
        lines = plot(panel, series, label, level=result["plateau"] if several else None)
    figure.axes[0].set_ylabel(f"held-out {result['reward']} reward")
    fewest, most = (limit(len(group.runs) for group in groups) for limit in (min, max))
    title = f"{result['reward']} reward on held-out prompts"
    if most > 1:
        title += f": mean and range of {most if fewest == most else f'{fewest} to {most}'} seeds"
    if several:
        note = f"dashed: {number(result['plateau'])}, the plateau of {result['reference']}"
        note += "; the legend has the time to it and the speed-up"
        title += "\n" + textwrap.fill(note, _TITLE, break_on_hyphens=False)
        title += f"\n{_DOTS}" if any(line.dots for line in series) else ""
    if result["simulated"] is not None:
        title += "\n" + textwrap.fill(result["simulated"]["note"], _TITLE, break_on_hyphens=False)
    figure.suptitle(title, fontsize=11)
    order = sorted(range(len(groups)), key=lambda number: reached[number][0])
    handles, texts = [lines[number] for number in order], [texts[number] for number in order]
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, fontsize=9.5, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _reached(facts: Mapping[str, Any], longest: float) -> tuple[float, str]:
    """Return the seconds to the plateau, and their text with the speed-up, in hours if the ``longest`` are."""
    points, (_, scale) = facts["to_reference"]["seconds"]["points"], cost_axis("seconds", longest)
    if not points:
        return float("inf"), ""
    reached = points[str(POINTS[-1])]
    if reached["mean"] is None:
        return float("inf"), ": not reached"
    spent = f"{reached['mean']:,.0f} s" if scale == 1 else f"{reached['mean'] / scale:,.1f} h"
    return reached["mean"], f": {spent}" + (f", {reached['speed_up']['mean']:.2f}x" if reached["speed_up"] else "")
