import math

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.callbacks.adaptive_exploration import AdaptiveExploration, Rule, next_level
from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.rollout.stage import Stage

RULE = Rule(threshold=0.9, margin=0.05, patience=2)
LEVELS = [
    [Stage("explore", "merged", 10, "euler", stop, keep=4), Stage("regenerate", "merged", 10, "euler")]
    for stop in (2, 3, 4)
]


@pytest.mark.parametrize(
    ("level", "fidelities", "expected"),
    [
        (1, [], 1),
        (1, [0.89], 2),
        (2, [0.89], 2),  # the most expensive one
        (1, [0.9], 1),
        (1, [0.99], 1),
        (1, [0.96, 0.96], 0),
        (0, [0.99, 0.99], 0),  # the cheapest one
        (1, [0.99, 0.94], 1),
        (1, [0.94, 0.99], 1),
        (1, [0.94, 0.99, 0.99], 0),
        (1, [0.99, 0.89], 2),
        (1, [0.99, math.nan], 1),
        (1, [math.nan, 0.99], 1),
    ],
)
def test_next_level(level: int, fidelities: list[float], expected: int) -> None:
    assert next_level(level, fidelities, len(LEVELS), RULE) == expected


class HasLevels(Callback):
    """As the loop of a run with levels."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.fit_loop.levels = LEVELS


def after(*probes: tuple[int, float], start: int = 0) -> int:
    adaptive = AdaptiveExploration(start, RULE)
    adaptive.levels = LEVELS
    rows = [{"iteration": i, "level": level, "spearman": value} for i, (level, value) in enumerate(probes, 1)]
    adaptive.load_state_dict({"probes": rows})
    return adaptive.level


def test_only_probes_of_the_level_since_the_last_move_count() -> None:
    assert after(start=1) == 1
    assert after((0, 0.8), start=2) == 1
    assert after((0, 0.8), (1, 0.99)) == 1  # one probe of the new level, of two that it takes
    assert after((0, 0.8), (1, 0.99), (1, 0.99)) == 0
    assert after((2, 0.8), (2, 0.99), (2, 0.99)) == 1  # the newest ones
    assert after((1, 0.99), (1, 0.99), (0, 0.8), (1, 0.99)) == 1  # those before the last move are of the past
    assert after((0, 0.99), (5, 0.99)) == 2  # a branched run has fewer levels


def test_probes_move_the_stages_of_the_next_iteration(fit, stand_in, capsys):
    adaptive, reversed_order = AdaptiveExploration(0, RULE), lambda seeds: -stand_in.rewards_of(seeds)
    roll_out = stand_in.RollOut(rewards_of=reversed_order)
    trainer = fit(HasLevels(), RankCorrelation(probe_every=1), adaptive, iterations=4, roll_out=roll_out)
    assert [probe["level"] for probe in adaptive.probes] == [0, 1, 2, 2]
    assert [probe["spearman"] for probe in adaptive.probes] == pytest.approx([-1] * 4)
    assert trainer.fit_loop.stages == LEVELS[2]
    assert float(trainer.callback_metrics["explore/level"]) == 2
    first, second = [line for line in capsys.readouterr().out.splitlines() if "moves" in line]
    levels = "from level 0 (merged, 2 of 10 steps) to level 1 (merged, 3 of 10 steps)"
    assert first == f"iteration 1: spearman -1.000 moves the exploration {levels}"
    assert second.startswith("iteration 2: ")


def test_the_probe_of_a_repeated_iteration_replaces_the_earlier_one(fit):
    ranks, adaptive = RankCorrelation(probe_every=1), AdaptiveExploration(2, RULE)
    ranks.load_state_dict({"history": [{"iteration": 1, "spearman": 0.96}]})
    adaptive.load_state_dict({"probes": [{"iteration": 1, "level": 2, "spearman": 0.96}]})
    fit(HasLevels(), ranks, adaptive)
    assert [(row["iteration"], row["spearman"]) for row in ranks.history] == [(1, pytest.approx(1))]
    assert adaptive.probes == [{"iteration": 1, "level": 2, "spearman": pytest.approx(1)}]
    assert adaptive.level == 2  # two probes in a row would move down


def test_good_probes_move_to_cheaper_levels(fit):
    adaptive = AdaptiveExploration(2, RULE)
    trainer = fit(HasLevels(), RankCorrelation(probe_every=2), adaptive, iterations=8)
    assert [(probe["iteration"], probe["level"]) for probe in adaptive.probes] == [(1, 2), (3, 2), (5, 1), (7, 1)]
    assert trainer.fit_loop.stages == LEVELS[0]  # of iteration 8
