"""What the tasks that measure leave behind: a JSON file in the run folder and a table on the terminal."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from solrl_lightning.callbacks.summary import finite_only
from solrl_lightning.files import write_atomically


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(finite_only(facts), indent=2) + "\n").encode())


def format_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they need; the first one, names, to the left and all others to the right. None is a dash."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(["", row[0].ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
