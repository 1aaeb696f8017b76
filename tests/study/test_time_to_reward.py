"""Costs at which learning curves reach a reward."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from solrl_lightning.study.time_to_reward import (
    INDEPENDENT,
    PAIRED,
    GroupCurve,
    Plateau,
    Reached,
    cost_to_reach,
    first_reached,
    plateau,
    speed_up,
)


def test_a_curve_is_linear_between_its_evaluations() -> None:
    for gaps, cost in (
        ([-0.2, -0.1, 0.1], 15.0),
        ([-0.2, 0.0, 0.1], 10.0),
        ([-0.3, 0.1, -0.2], 7.5),  # a later fall does not matter
        ([0.0, 0.1, 0.2], 0.0),
    ):
        assert first_reached([0.0, 10.0, 20.0], gaps) == pytest.approx(cost)
    assert first_reached([0.0, 10.0, 20.0], [-0.2, -0.1, -1e-9]) is None


def dense_interval(costs: list[float], low: np.ndarray, high: np.ndarray) -> tuple[float, float]:
    """First cost at which each limit reaches 0, on a fine grid."""
    grid = np.linspace(costs[0], costs[-1], 100_001)
    return grid[np.interp(grid, costs, high) >= 0][0], grid[np.interp(grid, costs, low) >= 0][0]


REWARDS = np.array([[0.40, 0.42, 0.42], [0.47, 0.50, 0.47], [0.56, 0.56, 0.55], [0.60, 0.62, 0.60]])
COSTS = [0.0, 10.0, 20.0, 40.0]
FINALS = {1: 0.51, 2: 0.53, 3: 0.52}


def equal(costs: list[float], seeds: Iterable[int]) -> list[dict[Any, float]]:
    return [dict.fromkeys(seeds, cost) for cost in costs]


def curve_of(*seeds: int) -> GroupCurve:
    return GroupCurve(equal(COSTS, seeds), [dict(zip(seeds, row, strict=True)) for row in REWARDS])


def test_the_interval_is_where_the_paired_difference_is_not_significant() -> None:
    gaps = REWARDS - np.array(list(FINALS.values()))
    limits = [stats.ttest_1samp(row, 0.0).confidence_interval(0.95) for row in gaps]
    reached = cost_to_reach(curve_of(1, 2, 3), FINALS)
    assert (reached.low, reached.high) == pytest.approx(dense_interval(COSTS, *np.array(limits).T), abs=1e-3)
    assert reached.mean == pytest.approx(10 + 10 * 0.04 / (0.04 + 0.11 / 3))
    assert (reached.spent, reached.interval) == (40, PAIRED)


def test_other_seeds_than_the_reference_are_not_paired() -> None:
    gaps = REWARDS.mean(axis=1) - 0.52
    reach = stats.t.ppf(0.975, 2) * np.hypot(stats.sem(REWARDS, axis=1), stats.sem(list(FINALS.values())))
    reached = cost_to_reach(curve_of(4, 5, 6), FINALS)
    assert (reached.low, reached.high) == pytest.approx(dense_interval(COSTS, gaps - reach, gaps + reach), abs=1e-3)
    assert reached.mean == pytest.approx(cost_to_reach(curve_of(1, 2, 3), FINALS).mean)
    assert reached.interval == INDEPENDENT


def test_rewards_and_costs_are_compared_on_the_common_seeds_only() -> None:
    of_common = GroupCurve(equal(COSTS, (1, 2)), [dict(zip((1, 2), row[:2], strict=True)) for row in REWARDS])
    expected = cost_to_reach(of_common, {1: 0.51, 2: 0.53})
    assert expected.interval == PAIRED and expected.mean is not None
    others = curve_of(1, 2, 4)
    slower = others._replace(costs=[costs | {4: 9 * costs[4]} for costs in others.costs])
    for curve in (of_common, others, slower):
        assert cost_to_reach(curve, FINALS | {3: 0.9}) == expected
    assert slower.cost == pytest.approx([11 / 3 * cost for cost in COSTS])


def test_one_seed_has_no_interval() -> None:
    curve = GroupCurve([{1: 0.0}, {1: 10.0}], [{1: 0.4}, {1: 0.6}])
    assert cost_to_reach(curve, {1: 0.5}) == (pytest.approx(5), None, None, 10, None)
    assert cost_to_reach(curve, FINALS) == (pytest.approx(5.5), None, None, 10, None)


def test_a_group_reaches_its_own_final_reward_at_its_end() -> None:
    rewards = [{1: 0.41, 2: 0.47}, {1: 0.5, 2: 0.52}, {1: 0.57, 2: 0.55}]
    reached = cost_to_reach(GroupCurve(equal([0.0, 5.0, 9.0], (1, 2)), rewards), rewards[-1])
    assert (reached.mean, reached.high) == (9, 9)


def test_the_speed_up_is_the_ratio_of_the_costs() -> None:
    reference = Reached(60, None, None, 60, None)
    assert speed_up(Reached(20, 15, 30, 80, PAIRED), reference) == {"mean": 3, "low": 2, "high": 4}
    assert speed_up(Reached(20, 0, None, 80, PAIRED), reference) == {"mean": 3, "low": None, "high": None}
    assert speed_up(Reached(None, 15, None, 80, PAIRED), reference) is None
    assert speed_up(reference, Reached(None, None, None, 80, None)) is None


def test_the_plateau_is_the_mean_of_the_last_third_of_the_cost() -> None:
    # Of r(t) = t from 100 to 220 s: 180 to 220, with the halves 180, 190 and 210, 220.
    times = [100.0 + 10 * i for i in range(13)]
    line = plateau(times, times)
    assert line == Plateau(base=100, level=200, rise=30)
    assert [line.reward_at(percent) for percent in (0, 25, 100)] == [100, 125, 200]
    # Of r(t) = 1 - exp(-t), densely to t = 9: the mean over [6, 9], and its halves.
    times = [i / 1000 for i in range(9001)]
    curve = plateau(times, [1 - np.exp(-time) for time in times])
    first, second = 1 - (np.exp(-6) - np.exp(-7.5)) / 1.5, 1 - (np.exp(-7.5) - np.exp(-9)) / 1.5
    assert curve == pytest.approx((0, (first + second) / 2, second - first), abs=1e-5)
    # Noise of one evaluation moves it by its share of the last third.
    assert plateau([0, 6, 7, 8, 9], [0.0, 1.0, 1.0, 1.4, 1.0]) == Plateau(0, pytest.approx(1.1), pytest.approx(0.2))
    assert plateau([0, 4], [0.1, 0.3]) == Plateau(0.1, 0.3, None)
