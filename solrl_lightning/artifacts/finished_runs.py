"""The run folders that a glob matches, and their summaries."""

import glob
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from solrl_lightning.artifacts.run_folder import RECORD
from solrl_lightning.errors import UserError

RECORDED_CONFIG = RECORD / "config.yaml"
RECORDED_OVERRIDES = RECORD / "overrides.yaml"
_RUN_MARKS = (".hydra", "checkpoints", "summary.json")  # any of these marks the folder of a run, not of a sweep
DAMAGED = "its summary.json is damaged"
FINISHED = ("completed", "stopped early")  # the status in summary.json of a run that ended as intended


class Run(NamedTuple):
    folder: str
    summary: dict[str, Any]

    @property
    def seed(self) -> Any:
        return self.summary["config"]["seed"]


def finished_runs(pattern: str) -> tuple[list[Run], dict[str, str]]:
    """Return the finished runs that a glob matches, and why each other one is left out. UserError if none is."""
    matches = [Path(match) for match in ([pattern] if Path(pattern).exists() else glob.glob(pattern))]
    folders = [folder for folder in matches if any((folder / mark).exists() for mark in _RUN_MARKS)]
    # Numbers in names are in numerical order.
    folders.sort(key=lambda folder: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", str(folder))])
    runs, left_out = read_runs(folders)
    if not runs:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in left_out.items())
        matched = reasons or f"{len(matches)} files or folders, none of which is a run's"
        raise UserError(
            f"task.runs={pattern} is invalid: it must be a glob that matches folders of finished runs; in {Path.cwd()} "
            f"it matches {matched}. Use 'task.runs=outputs/train/*' or, for sweeps, 'task.runs=outputs/multirun/*/*'."
        )
    return runs, left_out


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """Return the finished runs, and why each other one is left out."""
    runs, left_out = [], {}
    for folder in folders:
        summary = read_summary(folder)
        if summary["status"] not in FINISHED:
            left_out[str(folder)] = summary["status"]
        elif summary["final_reward"] is None:
            left_out[str(folder)] = "never evaluated"
        elif not _has_results(summary):
            left_out[str(folder)] = DAMAGED
        elif missing := [file for file in (RECORDED_CONFIG, RECORDED_OVERRIDES) if not (folder / file).is_file()]:
            left_out[str(folder)] = f"has no {missing[0]}"
        else:
            runs.append(Run(str(folder), summary))
    return runs, left_out


def end_of(folder: Path, iterations: int) -> str | None:
    """Return the status of a run that ended as intended after this number of iterations; None without its results."""
    summary = read_summary(folder)
    ended = summary["status"] in FINISHED and summary.get("iterations") == iterations
    return summary["status"] if ended else None


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of summary.json; where it is missing or damaged, a ``status`` alone says so."""
    if not (folder / "summary.json").is_file():
        return {"status": "has no summary.json (yet)"}
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (ValueError, RecursionError):  # endless brackets are a RecursionError
        summary = None
    match summary:
        case {"status": str(), "final_reward": _, "config": dict(), "evaluations": list(rows)}:
            return summary if all(isinstance(row, dict) for row in rows) else {"status": DAMAGED}
    return {"status": DAMAGED}


def _has_results(summary: dict[str, Any]) -> bool:
    """Return whether the values that comparisons read have their types, and an evaluation has the reward."""
    match summary:
        case {"reward": str(name), "final_reward": int() | float(), "config": {"seed": _, "family": _}}:
            rows = summary["evaluations"]
            scored = any(isinstance(row.get(name), int | float) for row in rows)
            timed = isinstance(summary.get("seconds_per_stage"), dict)
            return scored and timed and all(isinstance(row.get("iteration"), int) for row in rows)
    return False
