"""Line charts: the curves of a panel of matplotlib, and a chart as inline SVG for an HTML page.

Matplotlib draws without pyplot and without a display. In SVG the colours become CSS variables of the page, so that one
chart serves light, dark and printed pages, and text stays text.
"""

import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, ScalarFormatter

ITERATIONS, _EVALUATIONS = "iterations", "model evaluations"  # labels of an axis
_HOURS_FROM = 10_000  # seconds
_INK, _GRID, _WARN = "#1c2024", "#d9dee3", "#b25000"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c0568f", "#b07d00", "#3594cc", "#7f3c8d")  # after Okabe and Ito
_VARIABLES = {_INK: "var(--ink)", _GRID: "var(--grid)", _WARN: "var(--warn)"}
_VARIABLES |= {colour: f"var(--c{number})" for number, colour in enumerate(_COLOURS)}
_DASHES = ("", "6 3", "1.5 2", "6 2 1.5 2")  # SVG; one for every round of the colours
_SIZE = (4.4, 2.5)  # inches of 72 SVG units
_MARGINS = (0.14, 0.19, 0.98, 0.93)  # left, bottom, right and top edge of the axes; a layout engine takes 30 ms a chart
_FONT = 9  # SVG units
_FEW = 40  # points up to which each is marked


class Series(NamedTuple):
    """One line of a chart; ``low`` and ``high`` are the limits of a band around it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    is_reference: bool = False  # has the colour of text


class Chart(NamedTuple):
    """An SVG element with its title; legend entries are (label, CSS colour, SVG dashes), shown if there are several."""

    title: str
    svg: str
    legend: Sequence[tuple[str, str, str]]
    note: str = ""


def cost_axis(cost: str, largest: float) -> tuple[str, float]:
    """Label and divisor of the axis of a cost: "iteration", "evaluations", or "seconds", many of which become hours."""
    if cost == "seconds":
        return ("hours of training", 3600) if largest > _HOURS_FROM else ("seconds of training", 1)
    return {"iteration": ITERATIONS, "evaluations": _EVALUATIONS}[cost], 1


def looks(series: Sequence[Series]) -> list[tuple[str, str]]:
    """Colour and SVG dashes of each series."""
    found, number = [], 0
    for line in series:
        if line.is_reference:
            found.append((_INK, ""))
        else:
            turn, place = divmod(number, len(_COLOURS))
            found.append((_COLOURS[place], _DASHES[turn % len(_DASHES)]))
            number += 1
    return found


def plot(axes: Axes, series: Sequence[Series], x_label: str, level: float | None = None) -> list[Line2D]:
    """Draw the series, and a dashed line at the y ``level``; return the line of each series."""
    lines, band = [], 0.16 if len(series) < 4 else 0.07
    for line, (colour, dashes) in zip(series, looks(series), strict=True):
        style: Any = (0, tuple(map(float, dashes.split()))) if dashes else "-"
        marker = "o" if len(line.x) <= _FEW else None
        lines += axes.plot(line.x, line.y, color=colour, linestyle=style, linewidth=2, marker=marker, markersize=3)
        if line.low:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=band, linewidth=0)
    if level is not None:
        axes.axhline(level, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlabel(x_label, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=x_label == ITERATIONS))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    for axis in (axes.xaxis, axes.yaxis):
        formatter = ScalarFormatter(useOffset=False)
        formatter.set_powerlimits((-3, 6))
        axis.set_major_formatter(formatter)
        axis.get_offset_text().set_color(_INK)
    if x_label == _EVALUATIONS:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(color=_GRID, labelcolor=_INK)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    return lines


def draw_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    *,
    level: float | None = None,
    at: Sequence[float] = (),
    note: str = "",
) -> Chart:
    """Return a chart for a page, with vertical lines in the colour of warnings at the x ``at``."""
    # Without a hash salt the names in <defs> are random.
    text: Any = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": _FONT, "font.family": "DejaVu Sans"}
    with rc_context(text):
        figure = Figure(figsize=_SIZE)
        figure.subplots_adjust(*_MARGINS)
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        plot(axes, series, x_label, level)
        for x in at:
            axes.axvline(x, color=_WARN, linewidth=1.2, linestyle=(0, (2, 2)))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    legend = [
        (line.label, _VARIABLES[colour], dashes) for line, (colour, dashes) in zip(series, looks(series), strict=True)
    ]
    return Chart(title, _for_page(buffer.getvalue()), legend, note)


def _for_page(file: str) -> str:
    """The SVG element of a file of matplotlib, with the page's size, style and colours."""
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<style.*?</style>\s*", "", file[file.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # not unique on a page of several charts
    svg = re.sub(r' (?:width|height)="[^"]*pt"', "", svg)
    return re.sub("|".join(_VARIABLES), lambda colour: _VARIABLES[colour[0]], svg)
