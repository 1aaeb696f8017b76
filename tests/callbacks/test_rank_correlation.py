import pytest
import torch

from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.errors import UserError

PROBE_TAGS = {
    "rank/spearman",
    "rank/kendall",
    "rank/top_overlap",
    "rank/bottom_overlap",
    "rank/top_mean_rank",
    "rank/bottom_mean_rank",
}
KEPT_TAGS = {"rank/kept_spearman", "rank/kept_kendall"}


def test_probe_regenerates_the_whole_pool_of_one_prompt_before_the_optimiser_step(tmp_path, stand_in):
    roll_out, ranks = stand_in.RollOut(), RankCorrelation(probe_every=2)
    trainer = stand_in.trainer(tmp_path, [ranks], roll_out, max_epochs=4)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    # The probes of iterations 0 and 2 use the weight that explored: 1 - 0.8^n after n steps.
    assert [prompts for prompts, _ in roll_out.regenerated] == [["a"], ["a"]]
    assert [weight for _, weight in roll_out.regenerated] == pytest.approx([0.0, 1 - 0.8**2])
    assert [row["iteration"] for row in ranks.history] == [1, 3]
    of_the_last = float(trainer.callback_metrics["time/probe"])
    assert 0 < of_the_last < trainer.fit_loop.stopwatch.seconds["probe"]


def test_proxy_in_the_order_of_the_reward_has_perfect_values_under_every_tag(tmp_path, stand_in):
    trainer = stand_in.trainer(tmp_path, [RankCorrelation(probe_every=1)], max_epochs=1)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert values.pop("time/probe") == pytest.approx(trainer.fit_loop.stopwatch.seconds["probe"])
    assert set(values) == PROBE_TAGS | KEPT_TAGS
    k = stand_in.KEEP // 2
    perfect_top, perfect_bottom = (k + 1) / 2, stand_in.POOL - (k - 1) / 2
    expected = {"rank/top_mean_rank": perfect_top, "rank/bottom_mean_rank": perfect_bottom}
    assert values == pytest.approx({name: 1.0 for name in PROBE_TAGS | KEPT_TAGS} | expected)


def test_reversed_proxy_has_correlation_minus_one(tmp_path, stand_in):
    roll_out = stand_in.RollOut()
    roll_out.rewards_of = lambda seeds: -stand_in.rewards_of(seeds)
    trainer = stand_in.trainer(tmp_path, [RankCorrelation(probe_every=1)], roll_out, max_epochs=1)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    for tag in ("rank/spearman", "rank/kendall", "rank/kept_spearman", "rank/kept_kendall"):
        assert float(trainer.callback_metrics[tag]) == pytest.approx(-1.0)
    assert float(trainer.callback_metrics["rank/top_overlap"]) == 0.0


def test_probe_every_zero_never_probes(tmp_path, stand_in):
    roll_out, ranks = stand_in.RollOut(), RankCorrelation(probe_every=0)
    trainer = stand_in.trainer(tmp_path, [ranks], roll_out, max_epochs=2)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    assert (roll_out.regenerated, ranks.last) == ([], {})
    assert set(trainer.callback_metrics) == KEPT_TAGS


def test_a_negative_number_of_iterations_is_an_error(compose):
    with pytest.raises(UserError, match="callbacks.rank_correlation.probe_every=-1 is invalid: it must be a whole"):
        compose("callbacks.rank_correlation.probe_every=-1")


def test_family_of_one_stage_has_no_rank_correlation(tmp_path, stand_in):
    roll_out = stand_in.RollOut(two_stages=False)
    trainer = stand_in.trainer(tmp_path, [RankCorrelation(probe_every=1)], roll_out, max_epochs=1)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    assert (roll_out.regenerated, trainer.callback_metrics) == ([], {})


def test_pool_of_equal_rewards_logs_nan_and_does_not_stop_the_run(tmp_path, stand_in):
    roll_out, ranks = stand_in.RollOut(), RankCorrelation(probe_every=1)
    roll_out.rewards_of = lambda seeds: torch.full(seeds.shape, 0.5)
    trainer = stand_in.trainer(tmp_path, [ranks], roll_out, max_epochs=1)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    assert torch.isnan(trainer.callback_metrics["rank/spearman"])


def test_resume_restores_the_history_of_probes(tmp_path, stand_in):
    trainer = stand_in.trainer(tmp_path, [RankCorrelation(probe_every=1)], max_epochs=2)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    ranks = RankCorrelation(probe_every=1)
    trainer = stand_in.trainer(tmp_path, [ranks], max_epochs=3)
    trainer.fit(stand_in.Module(), stand_in.micro_batches(), ckpt_path=tmp_path / "x.ckpt")
    assert [row["iteration"] for row in ranks.history] == [1, 2, 3]
