"""Plateaus of learning curves, and the cost (seconds, forward passes, iterations) at which others reach them."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from solrl_lightning.study.confidence import difference_of_means, mean_of

PAIRED, INDEPENDENT = "paired by seed", "independent seeds"
POINTS = (25, 50, 75, 100)
"""Percent of the progress from the base to the plateau."""


class Plateau(NamedTuple):
    """What a learning curve reaches, whatever the noise of one evaluation."""

    base: float  # reward of the first evaluation
    level: float  # mean reward of the evaluations in the last third of the cost
    rise: float | None  # mean of the second half of these minus the first half's; None for a single one

    def reward_at(self, percent: float) -> float:
        """Return the reward after ``percent`` of the progress from base to plateau."""
        return self.base + percent / 100 * (self.level - self.base)


def plateau(costs: Sequence[float], rewards: Sequence[float]) -> Plateau:
    """Return the plateau of one run; of an odd number of evaluations the middle one is in neither half."""
    first, last = costs[0], costs[-1]
    end = [reward for cost, reward in zip(costs, rewards, strict=True) if 3 * (cost - first) >= 2 * (last - first)]
    half = len(end) // 2
    return Plateau(rewards[0], fmean(end), fmean(end[-half:]) - fmean(end[:half]) if half else None)


class GroupCurve(NamedTuple):
    """Learning curve of runs that differ in their seed only, at the E evaluations that all of them have."""

    costs: list[dict[Any, float]]  # [E], seed -> cost
    rewards: list[dict[Any, float]]  # [E], seed -> held-out reward

    @property
    def cost(self) -> list[float]:
        """Mean costs over the runs [E]."""
        return self.cost_of([*self.costs[0]])

    def cost_of(self, seeds: Sequence[Any]) -> list[float]:
        """Return the mean costs over the runs of ``seeds`` [E]."""
        return [fmean(costs[seed] for seed in seeds) for costs in self.costs]


class Reached(NamedTuple):
    """Cost at which a mean curve reaches a reward, with its 95 % interval."""

    mean: float | None  # None: not reached within `spent`
    low: float | None
    high: float | None  # None with an interval: the upper end lies beyond `spent`
    spent: float  # cost of the last evaluation
    interval: str | None  # PAIRED, INDEPENDENT, or None without an interval


def cost_to_reach(curve: GroupCurve, targets: Mapping[Any, float]) -> Reached:
    """Return the cost at which a group's mean reward first reaches the mean of ``targets`` (seed -> reward).

    Means of rewards and costs are over the common seeds, as rewards differ by seed, or over all if none is common. The
    interval contains the costs at which the group is not distinguishable from the target: it begins where the upper
    limit of the 95 % interval of reward minus target first reaches 0, and ends where the lower limit does (Student's t,
    at each evaluation; seed by seed for common seeds, which share prompts, initial adapters and noise).
    The deviations of the costs are not part of the interval.
    """
    common = [seed for seed in curve.rewards[0] if seed in targets]
    gaps = [
        mean_of([rewards[seed] - targets[seed] for seed in common])
        if common
        else difference_of_means(list(rewards.values()), list(targets.values()))
        for rewards in curve.rewards
    ]
    costs = curve.cost_of(common) if common else curve.cost
    reached, spent = first_reached(costs, [gap.mean for gap in gaps]), costs[-1]
    upper = [gap.high for gap in gaps if gap.high is not None]
    lower = [gap.low for gap in gaps if gap.low is not None]
    if not upper:
        return Reached(reached, None, None, spent, None)
    limits = first_reached(costs, upper), first_reached(costs, lower)
    return Reached(reached, *limits, spent, PAIRED if common else INDEPENDENT)


def first_reached(costs: Sequence[float], gaps: Sequence[float]) -> float | None:
    """Return the cost at which ``gaps``, linear between evaluations, is first at least 0; None if it never is."""
    for i, gap in enumerate(gaps):
        if gap >= 0:
            if i == 0:
                return costs[0]
            share = -gaps[i - 1] / (gap - gaps[i - 1])
            return costs[i - 1] + share * (costs[i] - costs[i - 1])
    return None


def speed_up(group: Reached, reference: Reached) -> dict[str, float | None] | None:
    """Return by which factor a group reaches the reward at a lower cost; None if one of the two does not reach it.

    Its ``mean`` has the limits ``low`` and ``high``, of the limits of the group's cost.
    """
    if not group.mean or reference.mean is None:  # cost 0: the base already has the reward
        return None
    low, high = (reference.mean / limit if limit else None for limit in (group.high, group.low))
    return {"mean": reference.mean / group.mean, "low": low, "high": high}
