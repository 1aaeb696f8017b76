"""The guard's rules: pure functions of a run's recorded history.

Evaluations use the same prompts and noise, so two of them are compared in pairs, prompt by prompt, and errors are over
prompts. Shapes: E evaluations, P held-out prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from solrl_lightning.callbacks.common import Moments
from solrl_lightning.options.rules import Count, Positive
from solrl_lightning.training.evaluation import with_base

_FEWEST_PROMPTS = 8  # with fewer, a standard error over prompts says little
_LEAST_FALL = 0.2  # in standard deviations over prompts, of a reward that has gained nothing yet
_LOST_GAIN = 0.25  # share of the gain over the base; setbacks of healthy runs reach 0.23
_NEAR_CONSTANT = 1e-4  # std / root mean square; real rewards have 1e-2 and more, float32 noise of equal images 1e-7
_SATURATED = 0.95  # share of samples on one extreme value

_NEARER = "a larger objective.kl_weight (a smaller objective.strength with objective=ram)"
METRICS = ("reward/mean", "train/kl", "train/drift", "train/grad_norm")
"""What the rules read of every iteration."""


class Limits(TypedDict):
    """When a rule raises an alarm; None: never."""

    fall: Positive | None
    """Standard errors that a held-out reward is below its best."""
    diversity: Positive | None
    """Share of the base's diversity that a prompt's pictures have lost."""
    kl: Positive | None
    """Mean squared distance of the velocity from the base's; the mean square of the velocity is about 2."""
    drift: Count | None
    """Consecutive iterations in which the old policy equals the trained one."""


@dataclass
class History:
    """What the rules read. ``tables`` are float64 [P, columns], see ``Evaluation.table``."""

    rows: list[dict[str, float]] = field(default_factory=list)  # one per iteration: its number and METRICS
    evaluated: list[int] = field(default_factory=list)  # iteration of each evaluation
    tables: list[Tensor] = field(default_factory=list)

    def until(self, iteration: int) -> "History":
        kept = sum(each <= iteration for each in self.evaluated)
        rows = [row for row in self.rows if row["iteration"] <= iteration]
        return History(rows, self.evaluated[:kept], self.tables[:kept])

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Return the iterations that have a metric, and its values."""
        rows = [row for row in self.rows if metric in row]
        return [int(row["iteration"]) for row in rows], [row[metric] for row in rows]

    def values(self, column: int) -> Tensor:
        """Return a column of all tables, float64 [E, P]; NaN where a prompt has no value."""
        return torch.stack([table[:, column] for table in self.tables])


class Alarm(NamedTuple):
    name: str
    iteration: int
    since: int  # the last iteration without the fault
    saw: str
    helps: str


def find_alarms(
    history: History, columns: Sequence[str], reward: str, watched: Mapping[str, float], limits: Limits
) -> list[Alarm]:
    """Return the alarms of the last iteration of ``history``.

    ``columns`` name the columns of its tables; ``reward`` is the trained one, and ``watched`` the weight of each reward
    of which it is the sum and of those that are only evaluated.
    """
    alarms = [kl_ran_away(history, limits["kl"]), no_drift(history, limits["drift"])]
    if len(history.tables) > 1 and len(history.tables[-1]) >= _FEWEST_PROMPTS:
        alarms += [
            reward_fell(history, columns.index(reward), reward, limits["fall"]),
            *(watched_fell(history, columns.index(name), name, watched[name], limits["fall"]) for name in watched),
            diversity_fell(history, columns.index("images/diversity"), limits["diversity"]),
        ]
    return [alarm for alarm in alarms if alarm is not None]


# Held-out rewards


def fall_of(values: Tensor, limit: float | None) -> tuple[int, str] | None:
    """Return the index of the best evaluation in ``values`` [E, P] and "fell from ...", or None without a fall.

    The last one is below it by at least ``limit`` standard errors of the paired difference, a quarter of what the best
    has gained over the first evaluation, and 0.2 standard deviations of the first over prompts: over those that have a
    value in all three, at least eight.
    """
    if limit is None:
        return None
    best = int(with_base(values, values[0].expand_as(values))[:-1].nanmean(1).argmax())
    compared = values[[0, best, -1]]
    compared = compared[:, compared.isfinite().all(0)]
    if compared.shape[1] < _FEWEST_PROMPTS:
        return None
    (first, top, last), lost = compared.mean(1).tolist(), compared[1] - compared[2]
    error = float(lost.std()) / len(lost) ** 0.5
    least = max(limit * error, _LOST_GAIN * (top - first), _LEAST_FALL * float(compared[0].std()))
    if not float(lost.mean()) >= least > 0:
        return None
    change = f"{top:.4g} to {last:.4g}"
    return best, f"fell from {change} (standard error of the difference {error:.2g})"


def reward_fell(history: History, column: int, name: str, limit: float | None) -> Alarm | None:
    """Return an alarm when the trained reward is below its best; training rewards tell collapse from overfitting."""
    fall = fall_of(history.values(column), limit)
    if fall is None:
        return None
    best, fell = fall
    rise = training_rise(history, history.evaluated[best])
    training = "" if rise is None else f"; the training reward {'rose' if rise > 0 else 'fell'} by {abs(rise):.4g}"
    overfits = rise is not None and rise > 0
    more = "more prompts in data.train, and a " if overfits else "a lower optimizer.lr, more prompts_per_iteration, a "
    saw, helps = f"the held-out {name} reward {fell}{training}", f"{more}{_NEARER.removeprefix('a ')}"
    return Alarm("reward_fell", history.evaluated[-1], history.evaluated[best], saw, helps)


def training_rise(history: History, since: int) -> float | None:
    """Return the mean training reward after an iteration minus the mean of up to as many before; None without both."""
    iterations, rewards = history.series("reward/mean")
    after = [value for i, value in zip(iterations, rewards, strict=True) if i > since]
    before = [value for i, value in zip(iterations, rewards, strict=True) if i <= since][-len(after) :]
    return fmean(after) - fmean(before) if after and before else None


def watched_fell(history: History, column: int, name: str, weight: float, limit: float | None) -> Alarm | None:
    """Return an alarm when a watched reward, or one of several, is below its best: others may be exploited."""
    fall = fall_of(history.values(column), limit)
    if fall is None:
        return None
    best, fell = fall
    saw = f"the {name} reward, of weight {weight:g}, {fell}"
    helps = f"a larger reward.{name}.weight, or {_NEARER}"
    return Alarm(f"{name}_reward_fell", history.evaluated[-1], history.evaluated[best], saw, helps)


# Distances from the base


def last_below_half(distances: Sequence[float], limit: float | None) -> int | None:
    """Return the index of the last distance below half the limit, or -1; None unless the last one is at the limit."""
    if limit is None or not distances or not distances[-1] >= limit:
        return None
    return max((i for i, distance in enumerate(distances) if distance < limit / 2), default=-1)


def diversity_fell(history: History, column: int, limit: float | None) -> Alarm | None:
    """Return an alarm when the pictures of a prompt have lost a share of the diversity of the first evaluation."""
    values = history.values(column)
    means = values[:, values.isfinite().all(0)].mean(1)
    lost = (1 - means / means[0]).tolist()
    since = last_below_half(lost, limit)
    if since is None:
        return None
    saw = (
        f"the diversity of a prompt's held-out pictures fell from {float(means[0]):.4g} to {float(means[-1]):.4g}, by "
        f"{lost[-1]:.0%}"
    )
    helps = f"a look at samples/, {_NEARER}, or a lower optimizer.lr"
    return Alarm("diversity_fell", history.evaluated[-1], history.evaluated[since], saw, helps)


def kl_ran_away(history: History, limit: float | None) -> Alarm | None:
    """Return an alarm when the distance of the policy from the base is at its limit."""
    iterations, values = history.series("train/kl")
    last = last_below_half(values, limit)
    if last is None:
        return None
    saw = f"train/kl, the distance of the policy from the base, is {values[-1]:.3g}; its limit is {limit:g}"
    since = iterations[last] if last >= 0 else 0
    return Alarm("kl_ran_away", iterations[-1], since, saw, f"{_NEARER}, or a lower optimizer.lr")


def no_drift(history: History, limit: int | None) -> Alarm | None:
    """Return an alarm when the distance to the old policy has been exactly 0 for ``limit`` iterations: what reads it
    never acts.

    With any lag it is not: already the rounding of nearly equal velocities is larger. In the first iteration it is 0,
    and as long as nothing is learnt, as from equal rewards.
    """
    iterations, values = history.series("train/drift")
    _, gradients = history.series("train/grad_norm")
    if limit is None or len(values) < limit or any(values[-limit:]) or (gradients and not any(gradients[-limit:])):
        return None
    since = max((i for i, value in zip(iterations, values, strict=True) if value), default=0)
    saw = "train/drift is exactly 0: the old policy is the trained one, so the loss is advantage-weighted regression"
    return Alarm("no_drift", iterations[-1], since, saw, "optimizer_steps=2, or an old_policy with a decay above 0")


# Rewards without information


def near_constant(kept: Moments) -> bool:
    """Return whether the standard deviation is at most 1e-4 of the root mean square, for any scale of the reward."""
    return kept.std <= _NEAR_CONSTANT * (kept.mean**2 + kept.std**2) ** 0.5


def reward_fault(
    kept: Moments, lowest: float, highest: float, at_lowest: float, at_highest: float, informative: bool = False
) -> tuple[str, str] | None:
    """Return what is wrong with an iteration's rewards and what helps, or None.

    ``informative``: what the samples are compared by is not near-constant, though their rewards may be.
    Saturated: at least 95 % of the samples have exactly the highest or the lowest reward of the iteration;
    ``at_lowest`` and ``at_highest`` are these shares.
    """
    if kept.samples < 2:
        return None
    if near_constant(kept) and not informative:
        return (
            f"all {kept.samples} rewards are nearly equal (mean {kept.mean:.6g}, std {kept.std:.2g})",
            "a check of reward.pretrained, because the reward model may not have loaded; a look at samples/, because "
            "the images may be black or alike",
        )
    if at_highest >= _SATURATED:
        return (
            f"{at_highest:.0%} of {kept.samples} rewards are exactly the highest value, {highest:.6g}",
            "harder prompts (data.train) or another reward, because these prompts are too easy for it",
        )
    if at_lowest >= _SATURATED:
        return (
            f"{at_lowest:.0%} of {kept.samples} rewards are exactly the lowest value, {lowest:.6g}",
            "a look at samples/, because the images may be black or broken; a check of reward.pretrained, because the "
            "reward model may not have loaded",
        )
    return None
