"""Results of tasks as JSON files and as tables on the terminal."""

import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from solrl_lightning.artifacts.files import finite_only, write_atomically
from solrl_lightning.artifacts.formatting import number
from solrl_lightning.errors import CheckFailed

OK, SLOW, WRONG, SKIPPED = "ok", "slow", "wrong", "skipped"
_WIDTH, _NAME, _STATUS = 100, 20, 9  # columns of a row and of its first two parts


class Row(NamedTuple):
    """The result of a check. ``slow``: works, and another option is faster; ``skipped``: not checked.

    ``expected``: the range of a result that is ``ok``, and where it is from; empty if any result is.
    """

    check: str
    status: str
    result: str
    way_out: str = ""
    measured: Mapping[str, Any] | None = None
    expected: str = ""


def judged(
    check: str,
    result: str,
    way_out: str,
    measured: Mapping[str, Any] | None,
    expected: str,
    *,
    wrong: bool = False,
    slow: bool = False,
) -> Row:
    """Return the row of a check; where it is neither ``wrong`` nor ``slow``, it has no ``way_out``."""
    status = WRONG if wrong else SLOW if slow else OK
    return Row(check, status, result, way_out if wrong or slow else "", measured, expected)


def check_right(wrong: Collection[str]) -> None:
    """Raise CheckFailed if there are names of rows or steps that are ``wrong``."""
    if wrong:
        raise CheckFailed(f"wrong here: {', '.join(wrong)}; the lines above say what to do.")


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write ``facts`` as JSON; NaN and infinities become null."""
    write_atomically(path, (json.dumps(finite_only(facts), indent=2) + "\n").encode())


def format_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table with names in the first column, aligned left, and values aligned right. None is a dash."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(["", row[0].ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)


def format_row(row: Row) -> str:
    """Format the row in lines of at most ``_WIDTH`` characters; the fix starts a new line."""
    parts = [row.result, *([f"-> {row.way_out}"] if row.way_out else [])]
    indent = _NAME + _STATUS
    lines = [line for part in parts for line in textwrap.wrap(part, _WIDTH - indent, break_on_hyphens=False)]
    return f"{row.check:<{_NAME}}{row.status:<{_STATUS}}" + ("\n" + " " * indent).join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else str(value)
