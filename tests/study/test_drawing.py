"""Charts of a page: what a reader sees of the SVG."""

import re
from xml.etree import ElementTree

import pytest

from solrl_lightning.study.drawing import COLOURS, Chart, Series, draw_chart
from solrl_lightning.study.report import evaluation_chart

pytestmark = pytest.mark.usefixtures("drawn_charts")


def texts(chart: Chart) -> list[str]:
    return re.findall("<text [^>]*>([^<]*)<", chart.svg)


def ticks(chart: Chart) -> list[str]:
    """Labels of the vertical axis, and its power of ten if it has one."""
    of_y = re.findall(r"text-anchor: end[^>]*>([^<]*)<", chart.svg)
    return of_y + [text for text in texts(chart) if text.startswith("1e")]


def test_colours_are_variables_and_styles_repeat_with_dashes() -> None:
    series = [Series(f"a & {i}", [0, 1, 2], [i, i + 1, i], [i - 1] * 3, [i + 2] * 3) for i in range(9)]
    series[0] = series[0]._replace(dots=[(0.5, 0.5), (1.5, 0.5)])
    chart = draw_chart("rewards", series, "iterations", level=3.0, at=[1])
    root = ElementTree.fromstring(chart.svg)
    assert "viewBox" in root.attrib and not {"width", "height"} & root.attrib.keys()
    assert not re.search("#[0-9a-f]{6}", chart.svg)
    assert set(re.findall(r"var\(--(\w+)\)", chart.svg)) == set(COLOURS)
    assert chart.legend[7:] == [("a & 7", "var(--c0)", "6 3"), ("a & 8", "var(--c1)", "6 3")]
    reference = [series[0]._replace(is_reference=True), series[1]]
    assert [colour for _, colour, _ in draw_chart("", reference, "iterations").legend] == ["var(--ink)", "var(--c0)"]


def test_a_chart_does_not_depend_on_those_drawn_before() -> None:
    first = draw_chart("", [Series("", [1, 2], [0.1, 0.2])], "iterations")
    draw_chart("", [Series("", [0, 9e5], [-50, 50], [-60, 40], [-40, 60])] * 2, "seconds of training", level=0, at=[4])
    assert draw_chart("", [Series("", [1, 2], [0.1, 0.2])], "iterations") == first
    assert len(set(re.findall(r' id="(\w+)"', first.svg))) == first.svg.count(" id=") <= 2  # a clip path and a marker


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.0, 0.0), ["−1.0", "−0.5", "0.0", "0.5", "1.0"]),
        ((0.49512345, 0.49512346), ["0.48", "0.49", "0.50", "0.51"]),
        ((0.0, 0.1), ["0.000", "0.025", "0.050", "0.075", "0.100"]),
        ((0.0, 3e-5), ["0", "1", "2", "3", "1e−5"]),
        ((2e6, 4e6), ["2.0", "2.5", "3.0", "3.5", "4.0", "1e6"]),
    ],
)
def test_ticks_are_short(values: tuple[float, float], expected: list[str]) -> None:
    assert ticks(draw_chart("", [Series("", [1, 2], values)], "iterations")) == expected


def test_a_curve_against_hours_is_in_hours() -> None:
    rows = [{"seconds": 3600.0 * hours, "shapes": 0.1 * hours} for hours in (0, 2, 10)]
    chart = evaluation_chart("title", rows, "shapes", "seconds")
    assert texts(chart)[:7] == ["0", "2", "4", "6", "8", "10", "hours of training"]
