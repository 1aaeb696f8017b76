"""Line charts by matplotlib: inline SVG for a page, and axes of a picture.

They are drawn in ``COLOURS``. In SVG these become CSS variables of the page, so that one chart serves light, dark and
printed pages. The functions import matplotlib, because a training run imports this file when it starts.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from functools import cache
from math import isclose
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

ITERATIONS = "iterations"  # label of an axis
COLOURS = {
    "paper": "#ffffff",
    "ink": "#1c2024",
    "grid": "#d9dee3",
    "warn": "#b25000",
    "c0": "#0072b2",  # after Okabe and Ito
    "c1": "#d55e00",
    "c2": "#009e73",
    "c3": "#c0568f",
    "c4": "#b07d00",
    "c5": "#3594cc",
    "c6": "#7f3c8d",
}
"""CSS variable of the page -> its colour on light paper."""
_NAMES = {colour: name for name, colour in COLOURS.items()}
_OF_LINES = [name for name in COLOURS if name[1:].isdigit()]
_DASHES = ("", "6 3", "1.5 2", "6 2 1.5 2")  # SVG; one for every round of the colours
_FEW = 40  # points up to which each is marked, where no dots are
_MANY = 10_000  # seconds or forward passes from which an axis has hours or thousands
_INCHES, _PLACE = (4.4, 2.5), (0.17, 0.21, 0.81, 0.71)  # size of a chart, and the edges of its axes as shares of it
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "chart", "font.sans-serif": "DejaVu Sans", "font.size": 10.5}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


class Series(NamedTuple):
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()  # limits of a band around y
    high: Sequence[float] = ()
    is_reference: bool = False  # has the colour of text
    dots: Sequence[tuple[float, float]] = ()  # points to mark


class Chart(NamedTuple):
    title: str
    svg: str
    legend: Sequence[tuple[str, str, str]]  # label, CSS colour, SVG dashes
    note: str = ""


def cost_axis(cost: str, largest: float) -> tuple[str, float]:
    """Return label and divisor of the axis of a cost: "iteration", "evaluations", "seconds", "simulated_seconds"."""
    if cost == "iteration":
        return ITERATIONS, 1
    if cost.endswith("seconds"):
        kind = "simulated " * cost.startswith("simulated")
        return (f"{kind}hours of training", 3600) if largest > _MANY else (f"{kind}seconds of training", 1)
    return ("thousands of forward passes", 1000) if largest > _MANY else ("forward passes", 1)


def line_styles(series: Sequence[Series]) -> list[tuple[str, str]]:
    """Return a key of ``COLOURS`` and SVG dashes for each series."""
    numbers = iter(range(len(series)))
    rounds = [None if line.is_reference else divmod(next(numbers), len(_OF_LINES)) for line in series]
    return [("ink", "") if turn is None else (_OF_LINES[turn[1]], _DASHES[turn[0] % len(_DASHES)]) for turn in rounds]


def style_axes(axes: Axes) -> None:
    """Give axes the style of all charts: lines at the ticks, no frame."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.ticklabel_format(useOffset=False, scilimits=(-3, 5))  # 1.5 under 1e−4 instead of 0.00015
    axes.tick_params(labelcolor=COLOURS["ink"], length=0)
    axes.yaxis.get_offset_text().set_color(COLOURS["ink"])
    axes.grid(color=COLOURS["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(COLOURS["grid"])


def plot(
    axes: Axes, series: Sequence[Series], x_label: str, *, level: float | None = None, at: Sequence[float] = ()
) -> list[Line2D]:
    """Draw the series, a dashed line at y = ``level`` and warnings at x in ``at``; return the line of each series."""
    from matplotlib.ticker import MaxNLocator

    lines, opacity = [], 0.16 if len(series) < 4 else 0.07
    few = 0 if any(line.dots for line in series) else _FEW
    for line, (name, dashes) in zip(series, line_styles(series), strict=True):
        colour, marker = COLOURS[name], "o" if len(line.x) <= few else None
        style: Any = (0, tuple(map(float, dashes.split()))) if dashes else "-"
        lines += axes.plot(line.x, line.y, color=colour, linestyle=style, linewidth=1.6, marker=marker, markersize=3)
        if line.low:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=opacity, linewidth=0)
        if line.dots:
            at_x, at_y = zip(*line.dots, strict=True)
            axes.scatter(at_x, at_y, 28, colour, edgecolors=COLOURS["paper"], zorder=4)
    if level is not None:
        axes.axhline(level, color=COLOURS["ink"], linewidth=0.8, linestyle=(0, (4, 3)))
    for x in at:
        axes.axvline(x, color=COLOURS["warn"], linewidth=1.2, linestyle=(0, (2, 2)))
    axes.set_xlabel(x_label, color=COLOURS["ink"])
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=x_label == ITERATIONS))
    values = [float(value) for line in series for value in (*line.y, *line.low, *line.high)]
    if values and isclose(min(values), max(values), rel_tol=1e-4):  # otherwise the axis would show rounding errors
        margin = 0.05 * abs(values[0]) or 1.0
        axes.set_ylim(min(values) - margin, max(values) + margin)
    return lines


@cache
def _page_figure() -> tuple[Figure, Axes]:
    """Return the axes on which the charts of a page are drawn one by one: new ones take longer than the drawing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES)
    axes = figure.add_axes(_PLACE)
    style_axes(axes)
    axes.xaxis.set_label_coords(0.5, -0.17)
    return figure, axes


def draw_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    *,
    level: float | None = None,
    at: Sequence[float] = (),
    limits: tuple[float, float] | None = None,
    note: str = "",
) -> Chart:
    """Return a chart for a page; ``level`` and ``at`` are as in ``plot``, ``limits`` are of y."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        (figure, axes), buffer = _page_figure(), io.StringIO()
        plot(axes, series, x_label, level=level, at=at)
        if limits is not None:
            margin = 0.03 * (limits[1] - limits[0])
            axes.set_ylim(limits[0] - margin, limits[1] + margin)
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
        for artist in (*axes.lines, *axes.collections):
            artist.remove()
        axes.relim()
        axes.autoscale()
    legend = [
        (line.label, f"var(--{colour})", dashes)
        for line, (colour, dashes) in zip(series, line_styles(series), strict=True)
    ]
    return Chart(title, _for_page(buffer.getvalue()), legend, note)


def _for_page(svg: str) -> str:
    """Return matplotlib's SVG with the page's font and variables, and without the ids that repeat on a page."""
    svg = svg[svg.index("viewBox=") : svg.rindex("</svg>")]
    for pattern, text in (
        (r' id="[\w.]+_\d+"| font-family: [^;]+;| transform="rotate\(-0 [^"]+"', ""),
        (r"<style.*</style>|<g ?/>", ""),
        (r"\s+", " "),
        (r'(\.\d\d)\d+(?=[ "])', r"\1"),  # hundredths of a point; "<" ends a text
    ):
        svg = re.sub(pattern, text, svg)
    svg = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {svg}</svg>'.replace("> <", "><")
    return re.sub("|".join(_NAMES), lambda match: f"var(--{_NAMES[match[0]]})", svg)
