"""Line charts as inline SVG for an HTML page; matplotlib takes 30 ms for one, and a report has two dozen.

Colours are CSS variables of the page (`--ink`, `--grid`, `--warn`, `--c0` to `--c6`), so that one chart serves light,
dark and printed pages.
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
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()  # limits of a band around y
    high: Sequence[float] = ()
    is_reference: bool = False  # has the colour of text


class Chart(NamedTuple):
    title: str
    svg: str
    legend: Sequence[tuple[str, str, str]]  # label, CSS colour, SVG dashes
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

    def horizontal(y: float, style: str) -> str:
        return f'<path d="M{_LEFT} {to_y(y):.1f}H{_RIGHT}" {style}/>'

    def vertical(x: float, style: str) -> str:
        return f'<path d="M{to_x(x):.1f} {_TOP}V{_BOTTOM}" {style}/>'

    def text(x: float, y: float, content: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'

    grid = 'stroke="var(--grid)" stroke-width=".6"'
    parts = [horizontal(tick, grid) + text(_LEFT - 5, to_y(tick) + 4, label, "end") for tick, label in y_ticks]
    parts += [vertical(tick, grid) + text(to_x(tick), _BOTTOM + 15, label) for tick, label in x_ticks]
    parts.append(text((_LEFT + _RIGHT) / 2, _HEIGHT - 6, x_label))
    legend, opacity = [], 0.16 if len(series) < 4 else 0.07
    for line, (number, dashes) in zip(series, looks(series), strict=True):
        colour = "var(--ink)" if number is None else f"var(--c{number})"
        legend.append((line.label, colour, dashes))
        if line.low:
            outline = _joined(points(line.x, line.high) + points(line.x, line.low)[::-1])
            parts.append(f'<polygon points="{outline}" fill="{colour}" opacity="{opacity}"/>')
        drawn = points(line.x, line.y)
        stroke = f'fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dashes}"'
        parts.append(f'<polyline points="{_joined(drawn)}" {stroke}/>')
        if len(drawn) <= FEW:
            parts += [f'<circle cx="{x}" cy="{y}" r="1.8" fill="{colour}"/>' for x, y in drawn]
    parts += [horizontal(y, 'stroke="var(--ink)" stroke-width=".8" stroke-dasharray="4 3"') for y in levels]
    parts += [vertical(x, 'stroke="var(--warn)" stroke-width="1.2" stroke-dasharray="2 2"') for x in at]
    attributes = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg" font-size="11" fill="var(--ink)"'
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
    values = [round(tick / 10.0**exponent, 9) + 0.0 for tick in ticks]  # + 0.0 turns -0.0 into 0.0
    decimals = max(len(f"{value:.6g}".partition(".")[2]) for value in values)
    return [f"{value:.{decimals}f}" + (f"e{exponent}" if exponent and value else "") for value in values]


def _joined(points: Sequence[tuple[str, str]]) -> str:
    return " ".join(map(",".join, points))
