"""The guard's rules on histories for which the answer is known."""

import math

import pytest
import torch
from torch import Tensor

from solrl_lightning.callbacks.alarms import Alarm, History, Limits, fall_of, find_alarms

LIMITS = Limits(fall=3.0, diversity=0.5, kl=0.5, drift=3)
COLUMNS = ["shapes", "bright", "images/diversity"]
PROMPTS = 64


def prompts(mean: float, spread: float = 0.1, noise: float = 0.0, seed: int = 0) -> Tensor:
    """Values of 64 prompts with exactly this mean; ``noise`` is of one evaluation, ``spread`` of the prompts."""
    line = torch.linspace(-1, 1, PROMPTS, dtype=torch.float64)
    normal = torch.randn(PROMPTS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return mean + spread * line / line.std() + noise * (normal - normal.mean()) / normal.std()


def curve(*means: float, noise: float = 0.08) -> Tensor:
    return torch.stack([prompts(mean, noise=noise, seed=seed) for seed, mean in enumerate(means)])


def history(every: int, **columns: list[float]) -> History:
    """Evaluations every few iterations with these means of the columns; the others stay at 0.5."""
    count = len(next(iter(columns.values())))
    rows = [{"iteration": i + 1, "reward/mean": 0.5} for i in range((count - 1) * every)]
    curves = [columns.get(name.removeprefix("images/"), [0.5] * count) for name in COLUMNS]
    return History(rows, [every * e for e in range(count)], list(torch.stack([curve(*c) for c in curves], dim=2)))


def metric(name: str, *values: float) -> History:
    return History([{"iteration": i, name: value} for i, value in enumerate(values, 1)])


def alarms(history: History, limits: Limits = LIMITS, **watched: float) -> list[Alarm]:
    return find_alarms(history, COLUMNS, "shapes", watched, limits)


def names_by_evaluation(whole: History) -> list[list[str]]:
    return [[alarm.name for alarm in alarms(whole.until(i), bright=0.0)] for i in whole.evaluated]


# Measured curves of the embedded model of version 0.2, standard error of a difference 0.014


@pytest.mark.parametrize(
    "means",
    [
        [0.433, 0.498, 0.557, 0.572, 0.584, 0.561, 0.567, 0.575, 0.593, 0.598, 0.606],
        [0.433, 0.532, 0.573, 0.593, 0.616, 0.625, 0.632, 0.636, 0.641, 0.649, 0.639],
        [0.433, 0.440, 0.433, 0.445, 0.436, 0.450],
    ],
)
def test_healthy_runs_raise_no_alarm(means: list[float]) -> None:
    assert names_by_evaluation(history(6, shapes=means)) == [[]] * len(means)


@pytest.mark.parametrize(
    ("means", "first"),
    [
        ([0.433, 0.528, 0.548, 0.564, 0.580, 0.554, 0.520], 6),  # kl_weight 1e-4: two evaluations after the best
        ([0.396, 0.465, 0.508, 0.534, 0.545, 0.528, 0.495, 0.467], 6),
        ([0.396, 0.443, 0.481, 0.492, 0.419], 4),  # one evaluation after it
    ],
)
def test_a_collapse_raises_an_alarm_within_two_evaluations(means: list[float], first: int) -> None:
    names = names_by_evaluation(history(3, shapes=means))
    assert names[: first + 1] == [[]] * first + [["reward_fell"]]


def test_a_fall_exceeds_its_standard_errors_a_share_of_the_gain_and_of_the_spread_over_prompts() -> None:
    assert fall_of(curve(0.4, 0.6, 0.54), 3.0) is not None  # 0.06 of a gain of 0.2: more than a quarter
    assert fall_of(curve(0.4, 0.6, 0.56, noise=0.01), 3.0) is None
    assert fall_of(curve(0.4, 0.6, 0.54, noise=0.2), 3.0) is None  # its standard error is 0.035
    assert fall_of(curve(0.5, 0.47, noise=0.01), 3.0) is not None  # below the base: more than 0.2 spreads
    assert fall_of(curve(0.5, 0.485, noise=0.01), 3.0) is None
    narrower = torch.stack([prompts(0.5), prompts(0.485, spread=0.01)])
    assert fall_of(narrower, 0.0) is None  # the spread is that of the base
    assert fall_of(curve(0.4, 0.6, 0.54), None) is None
    fall = fall_of(curve(0.4, 0.6, 0.55, 0.5), 3.0)
    assert fall is not None and fall[0] == 1
    text, error = fall[1].removesuffix(")").split(" (standard error of the difference ")
    assert text == "fell from 0.6 to 0.5" and float(error) == pytest.approx(0.08 * math.sqrt(2 / PROMPTS), rel=0.3)


def test_prompts_without_a_reward_are_left_out_of_a_fall_and_less_than_eight_have_none() -> None:
    values = curve(0.4, 0.6, 0.55, 0.5)
    whole = fall_of(values, 3.0)
    values[0, :3] = values[2, 4:] = values[3, 5:7] = math.nan  # those of an evaluation between two count in neither
    left = fall_of(values, 3.0)
    assert whole is not None and left is not None and left[0] == whole[0] == 1
    compared = values[[1, 3]][:, [i for i in range(PROMPTS) if i not in (0, 1, 2, 5, 6)]].mean(1)
    assert left[1].startswith(f"fell from {compared[0]:.4g} to {compared[1]:.4g} (")
    values[3, 7:] = math.nan
    assert fall_of(values, 3.0) is None
    values[3] = math.nan
    assert fall_of(values, 3.0) is None


@pytest.mark.parametrize(("trained", "helps"), [([0.5, 0.6], "more prompts in data.train"), ([0.5, 0.4], "lower")])
def test_an_alarm_tells_overfitting_from_a_collapse(trained: list[float], helps: str) -> None:
    whole = history(3, shapes=[0.4, 0.5, 0.6, 0.5])
    for row in whole.rows:  # as many iterations before the best evaluation count as there are after it
        row["reward/mean"] = 0.45 if row["iteration"] <= 3 else trained[row["iteration"] > 6]
    (alarm,) = alarms(whole)
    assert alarm[:3] == ("reward_fell", 9, 6)
    assert "fell from 0.6 to 0.5" in alarm.saw and f"{'rose' if trained[1] > 0.5 else 'fell'} by 0.1" in alarm.saw
    assert helps in alarm.helps and "objective.kl_weight" in alarm.helps


def test_a_watched_reward_that_falls_while_the_trained_one_rises() -> None:
    exploited = history(6, shapes=[0.4, 0.5, 0.6], bright=[0.5, 0.51, 0.45])
    assert names_by_evaluation(exploited) == [[], [], ["bright_reward_fell"]]
    assert alarms(exploited) == []


def test_diversity_is_measured_as_a_share_of_that_of_the_base() -> None:
    assert names_by_evaluation(history(6, diversity=[0.5, 0.4, 0.3, 0.26])) == [[]] * 4
    (alarm,) = alarms(history(6, diversity=[0.5, 0.4, 0.3, 0.24]))
    assert alarm[:3] == ("diversity_fell", 18, 6) and "from 0.5 to 0.24, by 52%" in alarm.saw


def test_few_prompts_raise_no_alarm_about_rewards_and_pictures() -> None:
    whole = history(3, shapes=[0.4, 0.6, 0.2])
    for count, names in ((4, []), (7, []), (8, ["reward_fell"])):
        cut = History(whole.rows, whole.evaluated, [table[:count] for table in whole.tables])
        assert [alarm.name for alarm in alarms(cut)] == names


def test_kl_at_its_limit_is_reported_since_half_of_it() -> None:
    for values, expected in (((0.1, 0.2, 0.3, 0.45, 0.5), (5, 2)), ((0.4, 0.6), (2, 0))):
        (alarm,) = alarms(metric("train/kl", *values))
        assert alarm[:3] == ("kl_ran_away", *expected)
    assert alarms(metric("train/kl", 0.1, 0.6, 0.4)) == []
    assert alarms(metric("train/kl", 0.6), {**LIMITS, "kl": None}) == []


def test_no_drift_is_exactly_0_in_some_iterations_in_a_row() -> None:
    for values, expected in (((0.0, 0.0, 0.0), (3, 0)), ((0.0, 5e-5, 0.0, 0.0, 0.0), (5, 2))):
        (alarm,) = alarms(metric("train/drift", *values))
        assert alarm[:3] == ("no_drift", *expected)
        assert "exactly 0" in alarm.saw and "old_policy" in alarm.helps
    for values in ((0.0, 0.0), (0.0, 0.0, 1e-12), (0.0, 5e-5, 0.0, 0.0), (0.0, *[1e-4] * 11)):  # the last: the default
        assert alarms(metric("train/drift", *values)) == []
    assert alarms(metric("train/drift", *[0.0] * 9), {**LIMITS, "drift": None}) == []
    for gradient, names in ((0.0, []), (0.1, ["no_drift"])):  # without a gradient nothing is learnt
        still = metric("train/drift", 0.0, 0.0, 0.0)
        rows = [row | {"train/grad_norm": gradient} for row in still.rows]
        assert [alarm.name for alarm in alarms(History(rows))] == names
