import pytest
import torch
from lightning.pytorch import Callback

from solrl_lightning.callbacks.rollout_stats import RolloutStats
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards


def test_mean_and_std_are_over_all_kept_samples(tmp_path, stand_in):
    trainer = stand_in.trainer(tmp_path, [RolloutStats()], max_epochs=1)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    kept, pool = trainer.fit_loop.rollouts.rewards, trainer.fit_loop.explored.rewards
    assert float(trainer.callback_metrics["reward/mean"]) == pytest.approx(float(kept.mean()))
    assert float(trainer.callback_metrics["reward/std"]) == pytest.approx(float(kept.std(correction=0)))
    assert float(trainer.callback_metrics["explore/proxy_reward"]) == pytest.approx(float(pool.mean()))


def test_mean_of_the_proxy_excludes_values_that_are_not_finite(tmp_path, stand_in):
    stats = RolloutStats()
    trainer = stand_in.trainer(tmp_path, [stats], max_epochs=1)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    explored = trainer.fit_loop.explored
    rest = explored.rewards[:, 1:]
    explored.rewards[:, 0] = torch.nan
    trainer.fit_loop.explored = explored
    from_hook = {}
    module = stand_in.Module()
    module.log = lambda name, value, **options: from_hook.update({name: value})
    stats.on_train_epoch_end(trainer, module)
    assert from_hook["explore/proxy_reward"] == pytest.approx(float(rest.mean()))


def test_every_reward_with_a_weight_has_its_mean_over_the_kept_samples(tmp_path, stand_in):
    class Scores(Callback):
        def on_train_epoch_start(self, trainer, module):
            rollouts = trainer.fit_loop.rollouts
            scores = torch.stack([rollouts.rewards, -2 * rollouts.rewards], dim=-1)
            trainer.fit_loop.rollouts = rollouts._replace(scores=scores)

    module, shapes = stand_in.Module(), ShapesReward()
    weights = {"shapes": 1.0, "watched": 0.0, "bright": -0.5}
    module.rewards = WeightedRewards(dict.fromkeys(weights, shapes), weights)
    trainer = stand_in.trainer(tmp_path, [RolloutStats()], max_epochs=1)
    trainer.callbacks.append(Scores())
    trainer.fit(module, stand_in.micro_batches())
    logged, mean = trainer.callback_metrics, float(trainer.fit_loop.rollouts.rewards.mean())
    assert float(logged["reward/shapes"]) == pytest.approx(mean)
    assert float(logged["reward/bright"]) == pytest.approx(-2 * mean) and "reward/watched" not in logged


def test_family_of_one_stage_logs_no_proxy_reward(tmp_path, stand_in):
    trainer = stand_in.trainer(tmp_path, [RolloutStats()], stand_in.RollOut(two_stages=False), max_epochs=1)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    stats = {"mean", "std", "group_std", "zero_std_fraction"}
    assert set(trainer.callback_metrics) == {f"reward/{name}" for name in stats}


def test_spread_within_prompts_and_prompts_without_spread_are_logged(tmp_path, stand_in):
    def every_second_prompt_constant(seeds):
        number = torch.arange(len(seeds))[:, None]
        return torch.where(number % 2 == 0, 0.3 + 0.1 * number, stand_in.rewards_of(seeds))

    roll_out = stand_in.RollOut(prompts=["a", "b", "c", "d"])
    roll_out.rewards_of = every_second_prompt_constant
    trainer = stand_in.trainer(tmp_path, [RolloutStats()], roll_out, max_epochs=1)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    logged, rewards = trainer.callback_metrics, trainer.fit_loop.rollouts.rewards
    assert float(logged["reward/zero_std_fraction"]) == 0.5
    assert float(logged["reward/group_std"]) == pytest.approx(float(rewards.std(dim=1, correction=0).mean()))
    assert float(logged["reward/group_std"]) < float(logged["reward/std"])
