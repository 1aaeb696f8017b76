from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from solrl_lightning.callbacks.rollout_stats import RolloutStats
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards


class NotFinite(Callback):
    """Makes the first proxy of every prompt NaN."""

    def on_train_batch_start(self, trainer, *args):
        trainer.fit_loop.explored.rewards[:, 0] = torch.nan


def test_mean_and_std_are_over_all_kept_samples_and_finite_proxies(fit):
    trainer = fit(RolloutStats(), NotFinite())
    kept, pool = trainer.fit_loop.rollouts.rewards, trainer.fit_loop.explored.rewards
    assert float(trainer.callback_metrics["reward/mean"]) == pytest.approx(float(kept.mean()))
    assert float(trainer.callback_metrics["reward/std"]) == pytest.approx(float(kept.std(correction=0)))
    assert float(trainer.callback_metrics["explore/proxy_reward"]) == pytest.approx(float(pool[:, 1:].mean()))


def test_every_reward_with_a_weight_has_its_mean_over_the_kept_samples(fit, stand_in):
    class Scores(Callback):
        def on_train_batch_start(self, trainer, *args):
            rollouts = trainer.fit_loop.rollouts
            scores = torch.stack([rollouts.rewards, -2 * rollouts.rewards], dim=-1)
            trainer.fit_loop.rollouts = rollouts._replace(scores=scores)

    module, weights = stand_in.StandIn(), {"shapes": 1.0, "watched": 0.0, "bright": -0.5}
    module.rewards = WeightedRewards(dict.fromkeys(weights, ShapesReward()), weights)
    trainer = fit(RolloutStats(), Scores(), module=module)
    logged, mean = trainer.callback_metrics, float(trainer.fit_loop.rollouts.rewards.mean())
    assert float(logged["reward/shapes"]) == pytest.approx(mean)
    assert float(logged["reward/bright"]) == pytest.approx(-2 * mean) and "reward/watched" not in logged


def test_family_of_one_stage_logs_no_proxy_reward(fit, stand_in):
    trainer = fit(RolloutStats(), roll_out=stand_in.RollOut(two_stages=False))
    names = ("mean", "std", "group_std", "zero_std_fraction")
    assert set(trainer.callback_metrics) == {f"reward/{name}" for name in names}


def test_metrics_of_explorers_are_logged(fit, stand_in):
    module = stand_in.StandIn()
    module.transformers.explorers = SimpleNamespace(
        metrics=lambda: {"lag": 0.75, "explorers": 3}, costs={"shapes_requests": 7}
    )
    module.rewards.rewards["shapes"].__class__ = type("Paid", (ShapesReward,), {"costs": {"requests": 2}})
    stats = RolloutStats()
    metrics = fit(stats, module=module).callback_metrics
    assert (float(metrics["explore/lag"]), float(metrics["explore/explorers"])) == (0.75, 3)
    assert float(metrics["reward/shapes_requests"]) == 9
    resumed = RolloutStats()
    resumed.load_state_dict(stats.state_dict())
    assert float(fit(resumed, module=module).callback_metrics["reward/shapes_requests"]) == 18


def test_spread_within_prompts_and_prompts_without_spread_are_logged(fit, stand_in):
    def every_second_prompt_constant(seeds):
        number = torch.arange(len(seeds))[:, None]
        return torch.where(number % 2 == 0, 0.3 + 0.1 * number, stand_in.rewards_of(seeds))

    trainer = fit(RolloutStats(), roll_out=stand_in.RollOut("abcd", rewards_of=every_second_prompt_constant))
    logged, rewards = trainer.callback_metrics, trainer.fit_loop.rollouts.rewards
    assert float(logged["reward/zero_std_fraction"]) == 0.5
    assert float(logged["reward/group_std"]) == pytest.approx(float(rewards.std(dim=1, correction=0).mean()))
    assert float(logged["reward/group_std"]) < float(logged["reward/std"])
