import warnings

import pytest
import torch

from solrl_lightning.callbacks.reward_guard import RewardGuard
from solrl_lightning.errors import UserError


def warned(tmp_path, stand_in, rewards_of, iterations, guard, prompts="ab") -> list[str]:
    roll_out = stand_in.RollOut(prompts)
    roll_out.rewards_of = rewards_of
    trainer = stand_in.trainer(tmp_path, [guard], roll_out, max_epochs=iterations)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(stand_in.Module(), stand_in.micro_batches())
    return [str(w.message) for w in caught if "consecutive iterations" in str(w.message)]


@pytest.mark.parametrize("value", [0.0, 0.51, -1.7])
def test_nearly_constant_rewards_are_reported_once_with_the_likely_cause(tmp_path, stand_in, value):
    def constant(seeds):
        return value * (1 + 1e-6 * stand_in.rewards_of(seeds))

    (message,) = warned(tmp_path, stand_in, constant, 5, RewardGuard(patience=3))
    assert "3 consecutive iterations up to iteration 3" in message
    assert "nearly equal" in message
    assert "reward model did not load" in message


@pytest.mark.parametrize(("extreme", "cause"), [(1.0, "too easy"), (0.0, "black or broken")])
def test_saturated_rewards_are_reported(tmp_path, stand_in, extreme, cause):
    def saturated(seeds):
        rewards = torch.full(seeds.shape, extreme)
        rewards[0, 0] = 0.5
        return rewards

    # One sample is not extreme: with 2 prompts 7 of 8 = 87.5 % are, with 6 prompts 23 of 24 = 95.8 %.
    assert warned(tmp_path, stand_in, saturated, 3, RewardGuard(patience=2), prompts="ab") == []
    (message,) = warned(tmp_path, stand_in, saturated, 3, RewardGuard(patience=2), prompts="abcdef")
    assert cause in message


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_rewards_that_differ_are_not_reported_at_any_scale(tmp_path, stand_in, scale):
    # PickScore varies by a few percent around its mean.
    def pickscore(seeds):
        return scale * (0.8 + 0.02 * stand_in.rewards_of(seeds))

    assert warned(tmp_path, stand_in, pickscore, 4, RewardGuard(patience=1)) == []


def test_guard_counts_consecutive_iterations_only(tmp_path, stand_in):
    calls = []

    def every_other(seeds):
        calls.append(1)
        return stand_in.rewards_of(seeds) if len(calls) % 2 else torch.zeros(seeds.shape)

    assert warned(tmp_path, stand_in, every_other, 6, RewardGuard(patience=2)) == []
    assert len(calls) == 6


def test_patience_of_zero_is_an_error():
    with pytest.raises(UserError, match="reward_guard.patience=0 is invalid: it must be at least 1 iteration"):
        RewardGuard(patience=0)
