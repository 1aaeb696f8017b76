"""The report of task=audit on the terminal: a table, early stops, the verdict and its command."""

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from solrl_lightning.artifacts.formatting import counted
from solrl_lightning.artifacts.tables import format_table
from solrl_lightning.metrics.selection_gain import GAIN_EXPONENT

_WIDTH = 110  # columns


def format_audit(result: dict[str, Any]) -> str:
    truth, pool, keep, without = result["truth"], result["pool"], result["keep"], result["without_selection"]
    columns = ["proxy", "spearman", "gap kept", "passes", "s/prompt", "rho", "gain", "cost", "gain/cost"]
    rows = [
        [
            row["name"],
            _number(row["spearman"], 3),
            _share(row),
            f"{row['evaluations']}+{row['regenerate_evaluations']}",
            *_costs(row, without),
        ]
        for row in result["proxies"]
    ]
    fidelity = ["-", "-"] if math.isnan(truth["spread_ratio"]) else ["1.000", "100 %"]
    rows.append(["the truth itself", *fidelity, truth["evaluations"], *_costs(truth, without)])
    rows.append(
        [f"{keep} random", None, None, without["evaluations"], f"{without['sampling_seconds']:.3g}", *["1.00"] * 4]
    )
    legend = (
        "gap kept: share of the true reward gap between best and worst; passes, s/prompt: forward passes and seconds "
        f"to explore + regenerate; rho: spread of the kept rewards over the spread of {keep} random ones; gain: "
        f"expected factor of what an iteration learns, rho ** {GAIN_EXPONENT}, between 1 and rho; cost: "
        f"seconds of an iteration, with {without['training_seconds']:.3g} s of training a prompt, over those without "
        "selection, of one run; [95 %: over prompts, and the error of the gain's estimate]"
    )
    best = next((row for row in result["proxies"] if row["name"] == result["recommended"]["closest"]), truth)
    equal = [f"{100 * groups['equal_groups']:.0f} %" for groups in (without, best)]
    return (
        f"against BF16 at {counted(truth['steps'], 'step')}, mean reward {truth['reward']:.4f}: "
        f"{counted(result['prompts'], 'prompt')} x {pool} seeds, {keep} kept\n"
        f"{wrapped(legend)}\n{format_table(columns, rows)}\n"
        f"groups of {keep} equal rewards, which teach nothing: {equal[0]} of random ones, {equal[1]} with selection"
    )


def format_search(result: Mapping[str, Any], min_gap: float) -> str:
    lines = ["early stops of one BF16 trajectory, simulated; the cheapest by forward passes a prompt:"]
    for row in (row for row in result["search"] if row["command"] is not None):
        enough = "" if row["enough"] else f", less than task.min_gap={min_gap}, the most"
        kept = f", keeping {'/'.join(map(str, row['keep']))}" if row["family"] == "race" else ""
        share = f"{_share(row)} of the gap{enough}"
        lines += [f"{row['family']}, {row['name']}{kept}: {row['evaluations']} passes, {share}", f"  {row['command']}"]
    return "\n".join(lines)


def wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False)


def _share(row: Mapping[str, Any]) -> str:
    error = "" if math.isnan(row["gap_error"]) else f" ± {100 * row['gap_error']:.0f}"
    return "-" if math.isnan(row["gap_kept"]) else f"{100 * row['gap_kept']:.0f}{error} %"


def _costs(row: Mapping[str, Any], without: Mapping[str, Any]) -> list[str]:
    sampling = f"{row['iteration_seconds'] - without['training_seconds']:.3g}"
    gain, ratio = _number(row["gain"]["mean"]), interval_of(row["gain_per_cost"])
    return [sampling, _number(row["spread_ratio"]), gain, f"{row['cost']:.2f}", ratio]


def _number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def interval_of(value: Mapping[str, float]) -> str:
    """Return ``1.31 [1.25, 1.37]``; "-" for NaN."""
    mean, low, high = (value[name] for name in ("mean", "low", "high"))
    if math.isnan(mean):
        return "-"
    return f"{mean:.2f}" if math.isnan(low) else f"{mean:.2f} [{low:.2f}, {high:.2f}]"
