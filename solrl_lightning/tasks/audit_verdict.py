"""The verdict of task=audit: whether selection pays in seconds here, and the command of what to run.

The gain of a proxy is by how much more an iteration is expected to learn with it than without selection
(``metrics/selection_gain.py``), its cost is the seconds of an iteration, divided by those without selection. It pays if
gain / cost is above 1.

Shapes: P prompts, N pool.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solrl_lightning.build import with_option
from solrl_lightning.metrics.selection_gain import (
    GAIN_ERROR,
    GAIN_EXPONENT,
    kept_variance,
    random_variance,
    ratio_of_sums,
)
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Audit, Benchmark
from solrl_lightning.rollout.stage import REGENERATE
from solrl_lightning.sizing.timing import run_iterations
from solrl_lightning.study.confidence import t_quantile
from solrl_lightning.tasks.audit_text import interval_of

_REPEATS = 4  # timed iterations, after one of warm-up


class Gain(NamedTuple):
    """A factor, its standard error over prompts, and a 95 % interval with the error of the estimate; NaN: unknown."""

    mean: float
    error: float
    low: float
    high: float

    def times(self, factor: float) -> "Gain":
        return Gain(*(factor * value for value in self))


def expected_gain(proxy: Tensor, truth: Tensor, keep: int) -> tuple[float, Gain]:
    """Return rho and the expected gain of selecting ``keep`` of the merits ``truth`` [P, N] by ``proxy`` [P, N].

    The interval of the gain's logarithm has two parts: Student's t times the error over prompts, by the jackknife, and
    two errors of the estimate itself.
    """
    squared, error = ratio_of_sums(kept_variance(proxy, truth, keep), random_variance(truth, keep))
    mean, prompts = squared ** (GAIN_EXPONENT / 2), len(truth)
    relative = GAIN_EXPONENT / 2 * error / squared if squared else math.nan
    reach = math.hypot(t_quantile(prompts - 1) * relative, 2 * GAIN_ERROR) if prompts > 1 else math.nan
    return math.sqrt(squared), Gain(mean, mean * relative, mean * math.exp(-reach), mean * math.exp(reach))


def seconds_without_selection(cfg: Run, device: torch.device) -> tuple[float, float]:
    """Measure iterations on ``keep`` candidates of one prompt: the seconds to sample them and to train on them.

    The median of four, after a warm-up.
    """
    changed, keep = with_option(cfg, "family", "diffusionnft"), cfg.task_as(Audit).keep
    changed.family.pool = changed.family.keep = keep
    changed.prompts_per_iteration = changed.optimizer_steps = 1
    changed.max_seconds, changed.data.train = None, changed.data.eval
    changed.task = Benchmark.model_construct(reads=["train"], repeats=_REPEATS)
    laps = run_iterations(changed, device)[1:]
    sampling, training = (median(lap[stage] for lap in laps) for stage in (REGENERATE, "train"))
    return sampling, training


def with_verdict(row: Mapping[str, Any], rho: float, gain: Gain, seconds: float, without: float) -> dict[str, Any]:
    """Return ``row`` with its gain and cost. ``seconds``, ``without``: of an iteration with and without selection."""
    cost = seconds / without
    return {
        **row,
        "spread_ratio": rho,
        "gain": gain._asdict(),
        "iteration_seconds": seconds,
        "cost": cost,
        "gain_per_cost": gain.times(1 / cost)._asdict(),
    }


def recommend(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the cheapest of the rows whose gain / cost is within its standard error of the largest.

    The cheapest by the seconds of an iteration; where they are equal to two digits, by forward passes. Rows without a
    command or a gain are left out; None if no row has them.
    """

    def cost(row: Mapping[str, Any]) -> tuple[float, int]:
        return float(f"{row['iteration_seconds']:.2g}"), row["evaluations"] + row["regenerate_evaluations"]

    possible = [row for row in rows if row["command"] is not None and not math.isnan(row["gain_per_cost"]["mean"])]
    best = max((row["gain_per_cost"] for row in possible), key=lambda ratio: ratio["mean"], default=None)
    if best is None:
        return None
    least = best["mean"] - (0 if math.isnan(best["error"]) else best["error"])
    return min((row for row in possible if row["gain_per_cost"]["mean"] >= least), key=cost)


def judge(row: Mapping[str, Any] | None, prompts: int, equal: bool) -> tuple[bool, str]:
    """Return whether selection by ``row`` pays, and a sentence. ``equal``: each prompt has equal rewards."""
    if equal:
        return False, "no verdict: all rewards of a prompt are equal, so no candidate can be preferred to another"
    if row is None:
        return False, "no verdict: no family can explore as these proxies do and then regenerate"
    ratio, gain = row["gain_per_cost"], row["gain"]
    facts = (
        f"with {row['name']} an iteration learns {gain['mean']:.2f} times as much (estimated) and takes "
        f"{row['cost']:.2f} times as long (seconds of one run), gain/cost {interval_of(ratio)}"
    )
    instead = f"; without it {gain['mean']:.2f} times the iterations learn as much" if gain["mean"] > 1 else ""
    if ratio["low"] > 1:
        return True, f"selection pays: {facts}"
    if ratio["high"] < 1:
        return False, f"selection does not pay: {facts}{instead}"
    few = not ratio["error"] <= GAIN_ERROR * ratio["mean"]
    more = f"task.prompts={4 * prompts} narrows the interval" if few else "a run of each tells"
    return False, f"not distinguishable: {facts}, includes 1; {more}{instead}"
