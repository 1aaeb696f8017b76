from statistics import pvariance, variance

import pytest
import torch

from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.data.prompt import Prompt

PROBE_TAGS = {f"rank/{name}" for name in "spearman kendall top_overlap bottom_overlap".split()}
KEPT_TAGS = {"rank/kept_spearman", "rank/kept_kendall"}


def test_probe_regenerates_the_whole_pool_of_one_prompt_before_the_optimizer_step(fit, stand_in):
    roll_out, ranks = stand_in.RollOut(), RankCorrelation(probe_every=2)
    trainer = fit(ranks, roll_out=roll_out, iterations=4)
    # The probes of iterations 0 and 2 use the weight that explored: 1 - 0.8^n after n steps.
    assert [prompts for prompts, _ in roll_out.regenerated] == [[Prompt("a")]] * 2
    assert [weight for _, weight in roll_out.regenerated] == pytest.approx([0.0, 1 - 0.8**2])
    assert [row["iteration"] for row in ranks.history] == [1, 3]
    of_the_last = float(trainer.callback_metrics["time/probe"])
    assert 0 < of_the_last < trainer.fit_loop.stopwatch.seconds["probe"]


def test_proxy_in_the_order_of_the_reward_has_perfect_values_under_every_tag(fit, stand_in):
    trainer = fit(RankCorrelation(probe_every=1))
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert values.pop("time/probe") == pytest.approx(trainer.fit_loop.stopwatch.seconds["probe"])
    k = stand_in.KEEP // 2
    places = {"rank/top_mean_rank": (k + 1) / 2, "rank/bottom_mean_rank": stand_in.POOL - (k - 1) / 2}
    pool = sorted(stand_in.rewards_of(trainer.fit_loop.explored.seeds[0]).tolist())
    by_chance = variance(pool) * (1 - 1 / stand_in.KEEP)
    spread = {"rank/spread_ratio": (pvariance(pool[:k] + pool[-k:]) / by_chance) ** 0.5}
    assert values == pytest.approx(dict.fromkeys(PROBE_TAGS | KEPT_TAGS, 1.0) | places | spread)


def test_probe_every_zero_never_probes_and_a_family_of_one_stage_has_no_proxy(fit, stand_in):
    for every, two_stages, tags in ((0, True, KEPT_TAGS), (1, False, set())):
        roll_out, ranks = stand_in.RollOut(two_stages=two_stages), RankCorrelation(probe_every=every)
        assert set(fit(ranks, roll_out=roll_out).callback_metrics) == tags
        assert (roll_out.regenerated, ranks.last) == ([], {})


def test_pool_of_equal_rewards_logs_nan_and_does_not_stop_the_run(fit, stand_in):
    roll_out = stand_in.RollOut(rewards_of=lambda seeds: torch.full(seeds.shape, 0.5))
    trainer = fit(RankCorrelation(probe_every=1), roll_out=roll_out)
    assert torch.isnan(trainer.callback_metrics["rank/spearman"])


def test_candidate_without_a_score_is_left_out_of_a_probe(fit, stand_in):
    """As of a judge that refuses a picture."""

    def rewards_of(seeds):
        rewards = stand_in.rewards_of(seeds)
        return rewards.where(rewards > rewards.min(), torch.nan)

    ranks = RankCorrelation(probe_every=1)
    fit(ranks, roll_out=stand_in.RollOut(rewards_of=rewards_of))
    assert [ranks.last[name] for name in ("spearman", "top_overlap", "bottom_overlap")] == pytest.approx([1] * 3)
    assert ranks.last["bottom_mean_rank"] == stand_in.POOL - 1 - (stand_in.KEEP // 2 - 1) / 2
    assert ranks.last["spread_ratio"] > 0


def test_resume_restores_the_history_of_probes(fit):
    ranks = RankCorrelation(probe_every=1)
    fit(ranks, iterations=3, resumed=fit(RankCorrelation(probe_every=1), iterations=2))
    assert [row["iteration"] for row in ranks.history] == [1, 2, 3]


def test_branch_into_a_family_without_exploration_drops_the_probes(fit, stand_in):
    ranks = RankCorrelation(probe_every=1)
    before = fit(RankCorrelation(probe_every=1), iterations=2)
    fit(ranks, iterations=3, resumed=before, roll_out=stand_in.RollOut(two_stages=False))
    assert (ranks.history, ranks.last_kept) == ([], {})


def test_the_probe_of_a_repeated_iteration_replaces_the_earlier_one(fit):
    ranks = RankCorrelation(probe_every=1)
    ranks.load_state_dict({"history": [{"iteration": 1, "spearman": 0.5}]})
    fit(ranks)
    assert [(row["iteration"], row["spearman"]) for row in ranks.history] == [(1, pytest.approx(1))]


def test_branch_into_another_reward_drops_the_probes_of_the_first(fit, stand_in):
    class OtherReward(stand_in.Evaluated):
        def setup(self, stage):
            self.rewards.name = "other"

    ranks = RankCorrelation(probe_every=1)
    fit(ranks, iterations=3, resumed=fit(RankCorrelation(probe_every=1), iterations=2), module=OtherReward())
    assert [row["iteration"] for row in ranks.history] == [3]
