"""Line charts as inline SVG for an HTML page.

Matplotlib draws them without pyplot and without a display. Colours are CSS variables of the page (`--ink`, `--grid`,
`--warn`, `--c0` to `--c6`), so that one chart serves light, dark and printed pages. Text stays text.
"""

import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

COLOURS = 7  # CSS variables --c0 to --c6
_DASHES = ("", "6 3", "1.5 2", "6 2 1.5 2")  # SVG; one for every round of the colours
_INK, _GRID, _WARN = "#010101", "#020202", "#030303"  # replaced by CSS variables
_VARIABLES = {_INK: "var(--ink)", _GRID: "var(--grid)", _WARN: "var(--warn)"}
_VARIABLES |= {f"#0400{number:02x}": f"var(--c{number})" for number in range(COLOURS)}
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


def look(number: int) -> tuple[str, str]:
    """CSS colour and SVG dashes of the series of this number."""
    return f"var(--c{number % COLOURS})", _DASHES[number // COLOURS % len(_DASHES)]


def draw_lines(
    series: Sequence[Series],
    x_label: str,
    *,
    whole_x: bool = False,
    level: float | None = None,
    at: Sequence[float] = (),
) -> str:
    """Return an SVG element.

    Args:
        whole_x: x are whole numbers.
        level: y of a dashed line.
        at: x of vertical lines in the colour of warnings.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    # Without a hash salt the names in <defs> are random.
    text: Any = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": _FONT, "font.family": "DejaVu Sans"}
    with rc_context(text):
        figure = Figure(figsize=_SIZE)
        figure.subplots_adjust(*_MARGINS)
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        band = 0.16 if len(series) < 4 else 0.07
        for number, line in enumerate(series):
            colour, dashes = f"#0400{number % COLOURS:02x}", look(number)[1]
            style = (0, tuple(map(float, dashes.split()))) if dashes else "-"
            marker = "o" if len(line.x) <= _FEW else None
            axes.plot(line.x, line.y, color=colour, linestyle=style, linewidth=1.6, marker=marker, markersize=2.6)
            if line.low:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=band, linewidth=0)
        if level is not None:
            axes.axhline(level, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
        for x in at:
            axes.axvline(x, color=_WARN, linewidth=1.2, linestyle=(0, (2, 2)))
        axes.set_xlabel(x_label, color=_INK)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole_x))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        for axis in (axes.xaxis, axes.yaxis):
            formatter = ScalarFormatter(useOffset=False)
            formatter.set_powerlimits((-3, 6))
            axis.set_major_formatter(formatter)
            axis.get_offset_text().set_color(_INK)
        axes.tick_params(color=_GRID, labelcolor=_INK)
        axes.grid(color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_GRID)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    return _for_page(buffer.getvalue())


def _for_page(file: str) -> str:
    """The SVG element of a file of matplotlib, with the page's size, style and colours."""
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<style.*?</style>\s*", "", file[file.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # not unique on a page of several charts
    svg = re.sub(r' (?:width|height)="[^"]*pt"', "", svg)
    return re.sub("|".join(_VARIABLES), lambda colour: _VARIABLES[colour[0]], svg)
