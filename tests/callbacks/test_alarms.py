"""The guard's rules on histories for which the answer is known."""

import math

import pytest
import torch
from torch import Tensor

from solrl_lightning.callbacks.alarms import Alarm, History, Limits, above, fall_of, find_alarms, jumped, no_drift

LIMITS = Limits(fall=3.0, lost_gain=0.25, pictures=3.0, diversity=0.5, kl=0.5, base_distance=0.5, jump=5.0, drift=3)
COLUMNS = ["shapes", "bright", "images/brightness", "images/saturation", "images/edges", "images/diversity"]
PROMPTS = 64


def prompts(mean: float, spread: float = 0.1, noise: float = 0.0, seed: int = 0) -> Tensor:
    """Values of 64 prompts with exactly this mean; ``noise`` is of one evaluation, ``spread`` of the prompts."""
    own = torch.linspace(-1, 1, PROMPTS, dtype=torch.float64)
    each = torch.randn(PROMPTS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return mean + spread * own / own.std() + noise * (each - each.mean()) / each.std()


def curve(*means: float, noise: float = 0.08) -> Tensor:
    return torch.stack([prompts(mean, noise=noise, seed=seed) for seed, mean in enumerate(means)])


def history(every: int, **columns: list[float]) -> History:
    """Evaluations every few iterations with these means of the columns; columns that are not given stay at 0.5."""
    count = len(next(iter(columns.values())))
    rows = [{"iteration": i + 1, "reward/mean": 0.5} for i in range((count - 1) * every)]
    means = [[columns.get(name.removeprefix("images/"), [0.5] * count)[e] for name in COLUMNS] for e in range(count)]
    tables = [torch.stack([prompts(m, noise=0.08, seed=e) for m in row], dim=1) for e, row in enumerate(means)]
    return History(rows, [every * e for e in range(count)], tables)


def names(found: list[Alarm]) -> list[str]:
    return [alarm.name for alarm in found]


def alarms_by_evaluation(whole: History) -> list[list[str]]:
    each = [find_alarms(whole.until(i), COLUMNS, "shapes", {"bright": 0.0}, LIMITS) for i in whole.evaluated]
    return [names(found) for found in each]


# Measured curves of the embedded model (dev/measurements/stability.md), standard error of a difference 0.014


@pytest.mark.parametrize(
    "means",
    [
        [0.433, 0.498, 0.557, 0.572, 0.584, 0.561, 0.567, 0.575, 0.593, 0.598, 0.606],
        [0.433, 0.511, 0.559, 0.596, 0.608, 0.597, 0.599, 0.602, 0.603, 0.613, 0.635],
        [0.433, 0.532, 0.573, 0.593, 0.616, 0.625, 0.632, 0.636, 0.641, 0.649, 0.639],
        [0.433, 0.440, 0.433, 0.445, 0.436, 0.450],
    ],
)
def test_no_alarm_in_healthy_runs(means: list[float]) -> None:
    assert alarms_by_evaluation(history(6, shapes=means)) == [[]] * len(means)


@pytest.mark.parametrize(
    ("means", "caught"),
    [
        ([0.433, 0.528, 0.548, 0.564, 0.580, 0.554, 0.520], 6),  # kl_weight 1e-4: two evaluations after the best
        ([0.396, 0.465, 0.508, 0.534, 0.545, 0.528, 0.495, 0.467], 6),
        ([0.396, 0.443, 0.481, 0.492, 0.419], 4),  # one evaluation after it
        ([0.396, 0.447, 0.486, 0.501, 0.346], 4),
    ],
)
def test_a_collapse_is_found_within_two_evaluations(means: list[float], caught: int) -> None:
    found = alarms_by_evaluation(history(3, shapes=means))
    assert found[:caught] == [[]] * caught
    assert found[caught] == ["reward_fell"]


def test_a_fall_counts_from_its_errors_its_share_of_the_gain_and_the_spread_over_prompts() -> None:
    assert fall_of(curve(0.4, 0.6, 0.54), LIMITS) is not None  # 0.06 of a gain of 0.2: more than a quarter
    assert fall_of(curve(0.4, 0.6, 0.56, noise=0.01), LIMITS) is None
    assert fall_of(curve(0.4, 0.6, 0.54, noise=0.2), LIMITS) is None  # its standard error is 0.035
    assert fall_of(curve(0.5, 0.47, noise=0.01), LIMITS) is not None  # below the base: more than 0.2 spreads
    assert fall_of(curve(0.5, 0.485, noise=0.01), LIMITS) is None
    narrower = torch.stack([prompts(0.5), prompts(0.485, spread=0.01)])
    assert fall_of(narrower, LIMITS._replace(fall=0.0)) is None  # the spread is that of the base
    assert fall_of(curve(0.4, 0.6, 0.54), LIMITS._replace(fall=None)) is None
    fall = fall_of(curve(0.4, 0.6, 0.55, 0.5), LIMITS)
    assert fall is not None and fall[0] == 1
    text, error = fall[1].removesuffix(")").split(" (standard error of the difference ")
    assert text == "fell from 0.6 to 0.5" and float(error) == pytest.approx(0.08 * math.sqrt(2 / PROMPTS), rel=0.3)


@pytest.mark.parametrize(("trained", "helps"), [([0.5, 0.6], "more prompts in data.train"), ([0.5, 0.4], "lower")])
def test_an_alarm_tells_overfitting_from_a_collapse(trained: list[float], helps: str) -> None:
    whole = history(3, shapes=[0.4, 0.5, 0.6, 0.5])
    for row in whole.rows:  # as many iterations before the best evaluation count as there are after it
        row["reward/mean"] = 0.45 if row["iteration"] <= 3 else trained[row["iteration"] > 6]
    (alarm,) = find_alarms(whole, COLUMNS, "shapes", {}, LIMITS)
    assert (alarm.name, alarm.iteration, alarm.since) == ("reward_fell", 9, 6)
    assert "fell from 0.6 to 0.5" in alarm.saw and f"{'rose' if trained[1] > 0.5 else 'fell'} by 0.1" in alarm.saw
    assert helps in alarm.helps and "objective.kl_weight" in alarm.helps


def test_a_watched_reward_that_falls_while_the_trained_one_rises() -> None:
    hacked = history(6, shapes=[0.4, 0.5, 0.6], bright=[0.5, 0.51, 0.45])
    assert alarms_by_evaluation(hacked) == [[], [], ["bright_reward_fell"]]
    assert find_alarms(hacked, COLUMNS, "shapes", {}, LIMITS) == []


def test_statistics_of_pictures_are_measured_in_the_spread_of_the_base_over_prompts() -> None:
    whole = history(6, brightness=[0.5, 0.6, 0.75, 0.85], edges=[0.5, 0.5, 0.4, 0.05])  # spread 0.13
    assert alarms_by_evaluation(whole) == [[], [], [], ["edges_moved"]]
    whole = history(6, brightness=[0.5, 0.6, 0.75, 0.95])
    (alarm,) = find_alarms(whole, COLUMNS, "shapes", {}, LIMITS)
    assert (alarm.name, alarm.iteration, alarm.since) == ("brightness_moved", 18, 6)
    assert "from 0.5 to 0.95" in alarm.saw
    whole = history(6, brightness=[0.5, 0.85])
    whole.tables[-1][:, COLUMNS.index("images/brightness")] = prompts(0.85, spread=0.01)
    assert alarms_by_evaluation(whole) == [[], []]


def test_diversity_is_measured_as_a_share_of_that_of_the_base() -> None:
    assert alarms_by_evaluation(history(6, diversity=[0.5, 0.4, 0.3, 0.26])) == [[]] * 4
    whole = history(6, diversity=[0.5, 0.4, 0.3, 0.24])
    (alarm,) = find_alarms(whole, COLUMNS, "shapes", {}, LIMITS)
    assert (alarm.name, alarm.iteration, alarm.since) == ("diversity_fell", 18, 6)
    assert "from 0.5 to 0.24, by 52%" in alarm.saw


def test_few_prompts_raise_no_alarm_about_rewards_and_pictures() -> None:
    whole = history(3, shapes=[0.4, 0.6, 0.2])
    few = History(whole.rows, whole.evaluated, [table[:4] for table in whole.tables])
    assert find_alarms(few, COLUMNS, "shapes", {}, LIMITS) == []


def metric(name: str, values: list[float]) -> History:
    return History([{"iteration": i, name: value} for i, value in enumerate(values, 1)])


def test_a_distance_above_its_limit_is_reported_since_half_of_it() -> None:
    alarm = above(metric("train/kl", [0.1, 0.2, 0.3, 0.45, 0.5]), "train/kl", 0.5)
    assert alarm is not None and (alarm.name, alarm.iteration, alarm.since) == ("kl_ran_away", 5, 2)
    alarm = above(metric("train/kl", [0.4, 0.6]), "train/kl", 0.5)
    assert alarm is not None and (alarm.iteration, alarm.since) == (2, 0)
    assert above(metric("train/kl", [0.1, 0.6, 0.4]), "train/kl", 0.5) is None
    assert above(metric("train/kl", [0.6]), "train/kl", None) is None
    assert above(metric("train/loss", [0.6]), "train/kl", 0.5) is None


def test_no_drift_is_exactly_0_in_some_iterations_in_a_row() -> None:
    name = "train/drift"
    (alarm,) = find_alarms(metric(name, [0.0, 0.0, 0.0]), COLUMNS, "shapes", {}, LIMITS)
    assert (alarm.name, alarm.iteration, alarm.since) == ("no_drift", 3, 0)
    assert "exactly 0" in alarm.saw and "old_policy" in alarm.helps
    alarm = no_drift(metric(name, [0.0, 5e-5, 0.0, 0.0, 0.0]), 3)
    assert alarm is not None and (alarm.iteration, alarm.since) == (5, 2)
    for values in ([0.0, 0.0], [0.0, 0.0, 1e-12], [0.0, 5e-5, 0.0, 0.0], [0.0, *[1e-4] * 11]):  # the last: the default
        assert no_drift(metric(name, values), 3) is None
    assert no_drift(metric(name, [0.0] * 9), None) is None
    assert no_drift(metric("train/kl", [0.0] * 9), 3) is None  # an objective without an old policy


def test_a_jump_is_a_median_out_of_the_range_before() -> None:
    calm = [1.0, 1.1, 1.2, 1.1, 1.0, 1.1, 1.2]
    name = "train/grad_norm"
    alarm = jumped(metric(name, [*calm, 2.3, 2.3, 2.3]), name, 5.0)
    assert alarm is not None and (alarm.name, alarm.iteration, alarm.since) == ("grad_norm_jumped", 10, 7)
    assert "1 to 1.2 in 7 iterations" in alarm.saw
    assert jumped(metric(name, calm[-5:] + [2.3] * 3), name, 5.0) is None  # 6 before are needed
    assert jumped(metric(name, [*calm, 1.1, 9.0, 1.1]), name, 5.0) is None  # a single iteration
    assert jumped(metric(name, [*calm, 2.0, 2.0, 2.0]), name, 5.0) is None  # less than 5 ranges of 0.2
    assert jumped(metric(name, [*calm, 2.3, 2.3, 2.3]), name, None) is None
    assert jumped(metric(name, [1.0] * 12), name, 5.0) is None
    assert jumped(metric(name, [0.1 * 1.2**i for i in range(30)]), name, 5.0) is None  # steady growth
