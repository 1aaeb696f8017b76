"""Line charts as inline SVG for an HTML page.

Colours are CSS variables of the page (`--ink`, `--grid`, `--warn`, `--c0` to `--c6`), so that one chart serves light,
dark and printed pages. Matplotlib places the ticks; to draw a chart takes it 30 ms, and a report has two dozen.
"""

from collections.abc import Callable, Sequence
from html import escape
from math import floor, isclose, isfinite, log10
from typing import NamedTuple

ITERATIONS = "iterations"  # label of an axis
_DASHES = ("", "6 3", "1.5 2", "6 2 1.5 2")  # SVG; one for every round of the colours
_COLOURS = 7  # CSS variables --c0 to --c6
FEW = 40  # points up to which each is marked
_MANY = 10_000  # seconds or model evaluations from which an axis has hours or thousands
_WIDTH, _HEIGHT = 317, 180  # SVG units
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 310, 12, 142  # edges of the axes


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
    """Label and divisor of the axis of a cost: "iteration", "evaluations" or "seconds"."""
    if cost == "iteration":
        return ITERATIONS, 1
    if cost == "seconds":
        return ("hours of training", 3600) if largest > _MANY else ("seconds of training", 1)
    return ("thousands of model evaluations", 1000) if largest > _MANY else ("model evaluations", 1)


def looks(series: Sequence[Series]) -> list[tuple[int | None, str]]:
    """Number of the colour and SVG dashes of each series; None for the colour of text, which the reference has."""
    numbers = iter(range(len(series)))
    turns = [None if line.is_reference else divmod(next(numbers), _COLOURS) for line in series]
    return [(None, "") if turn is None else (turn[1], _DASHES[turn[0] % len(_DASHES)]) for turn in turns]


def draw_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    *,
    level: float | None = None,
    at: Sequence[float] = (),
    note: str = "",
) -> Chart:
    """Return a chart for a page. A value that is not finite is left out.

    Args:
        level: y of a dashed line.
        at: x of vertical lines in the colour of warnings.
    """
    levels = [] if level is None else [level]
    x_ticks, to_x = _axis([*(x for line in series for x in line.x), *at], 6, _LEFT, _RIGHT, x_label == ITERATIONS)
    y_ticks, to_y = _axis([y for line in series for y in (*line.y, *line.low, *line.high)] + levels, 5, _BOTTOM, _TOP)

    def points(x: Sequence[float], y: Sequence[float]) -> list[tuple[str, str]]:
        finite = [each for each in zip(x, y, strict=True) if all(map(isfinite, each))]
        return [(f"{to_x(a):.1f}", f"{to_y(b):.1f}") for a, b in finite]

    parts = []
    for tick, text in y_ticks:
        parts.append(f'<path d="M{_LEFT} {to_y(tick):.1f}H{_RIGHT}" stroke="var(--grid)" stroke-width=".6"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{to_y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    for tick, text in x_ticks:
        parts.append(f'<path d="M{to_x(tick):.1f} {_TOP}V{_BOTTOM}" stroke="var(--grid)" stroke-width=".6"/>')
        parts.append(f'<text x="{to_x(tick):.1f}" y="{_BOTTOM + 15}" text-anchor="middle">{text}</text>')
    middle = (_LEFT + _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    opacity = 0.16 if len(series) < 4 else 0.07
    styles = [("var(--ink)" if colour is None else f"var(--c{colour})", dashes) for colour, dashes in looks(series)]
    for line, (colour, dashes) in zip(series, styles, strict=True):
        if line.low:
            outline = points(line.x, line.high) + points(line.x, line.low)[::-1]
            parts.append(f'<polygon points="{_joined(outline)}" fill="{colour}" opacity="{opacity}"/>')
        drawn = points(line.x, line.y)
        stroke = f'fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dashes}"'
        parts.append(f'<polyline points="{_joined(drawn)}" {stroke}/>')
        if len(drawn) <= FEW:
            parts += [f'<circle cx="{x}" cy="{y}" r="1.8" fill="{colour}"/>' for x, y in drawn]
    for y in levels:
        style = 'stroke="var(--ink)" stroke-width=".8" stroke-dasharray="4 3"'
        parts.append(f'<path d="M{_LEFT} {to_y(y):.1f}H{_RIGHT}" {style}/>')
    for x in at:
        style = 'stroke="var(--warn)" stroke-width="1.2" stroke-dasharray="2 2"'
        parts.append(f'<path d="M{to_x(x):.1f} {_TOP}V{_BOTTOM}" {style}/>')
    attributes = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg" font-size="11" fill="var(--ink)"'
    legend = [(line.label, *style) for line, style in zip(series, styles, strict=True)]
    return Chart(title, f"<svg {attributes}>{''.join(parts)}</svg>", legend, note)


def _axis(
    values: Sequence[float], count: int, start: float, end: float, whole: bool = False
) -> tuple[list[tuple[float, str]], Callable[[float], float]]:
    """Return at most ``count`` + 1 ticks with their texts, and the map of a value to SVG units."""
    from matplotlib.ticker import MaxNLocator

    finite = [value for value in values if isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if isclose(low, high, rel_tol=1e-4):
        ticks, margin = [float(f"{low:.4g}")], 0.05 * abs(high) or 1.0
    else:
        locator, margin = MaxNLocator(count, steps=[1, 2, 5, 10], integer=whole), 0.05 * (high - low)
        ticks = [float(tick) for tick in locator.tick_values(low, high)]
    low, high = low - margin, high + margin
    ticks = [tick for tick in ticks if low <= tick <= high]
    shown = list(zip(ticks, _texts(ticks), strict=True))
    return shown, lambda value: start + (value - low) / (high - low) * (end - start)


def _texts(ticks: Sequence[float]) -> list[str]:
    """Return the ticks with one number of decimals and one exponent."""
    largest = max(map(abs, ticks))
    exponent = floor(log10(largest)) if largest > 0 and not 1e-3 <= largest < 1e6 else 0
    values = [round(tick / 10.0**exponent, 6) + 0.0 for tick in ticks]  # + 0.0 turns -0.0 into 0.0
    decimals = max(len(f"{value:.6g}".partition(".")[2]) for value in values)
    return [f"{value:.{decimals}f}" + (f"e{exponent}" if exponent and value else "") for value in values]


def _joined(points: Sequence[tuple[str, str]]) -> str:
    return " ".join(map(",".join, points))
