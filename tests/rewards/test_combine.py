"""What a prompt's candidates are compared by: the weighted sum, or rewards that are normalised first (GDPO)."""

import numpy as np
import pytest
import torch
from torch import Tensor

from solrl_lightning.objectives.advantages import group_advantages
from solrl_lightning.rewards.weighted import gdpo, weighted_sum
from solrl_lightning.rollout.select import select_contrastive

P, N, KEEP = 3, 12, 4


def scores(*scales: float) -> Tensor:
    """[P, N, R], independent normal rewards with these standard deviations and a mean of a half."""
    noise = torch.randn(P, N, len(scales), generator=torch.Generator().manual_seed(0))
    return noise * torch.tensor(scales) + 0.5


def extremes(merits: Tensor) -> list[set[int]]:
    return [set(row) for row in select_contrastive(merits, KEEP).tolist()]


def test_gdpo_matches_its_equation() -> None:
    """Each reward over its prompt: (score - mean) / std, times its weight, summed; then divided by the batch's std."""
    rewards, weights = scores(1.0, 100.0, 3.0), [1.0, 0.5, -2.0]
    s = rewards.double().numpy()
    expected = np.zeros((P, N))
    for p in range(P):
        for r, weight in enumerate(weights):
            expected[p] += weight * (s[p, :, r] - s[p, :, r].mean()) / s[p, :, r].std()
    merits = gdpo(rewards, torch.tensor(weights))
    assert merits.shape == (P, N) and merits.dtype == torch.float32
    np.testing.assert_allclose(merits, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(group_advantages(merits), expected / (expected.std() + 1e-4), rtol=1e-5, atol=1e-6)


def test_a_large_reward_decides_the_sum_and_its_share_of_gdpo() -> None:
    weights, rewards = torch.ones(2), scores(1.0, 100.0)

    def agreement(merits: Tensor, reward: int) -> float:
        """The smallest correlation of a prompt."""
        pairs = zip(merits, rewards[..., reward], strict=True)
        return min(float(torch.stack(pair).corrcoef()[0, 1]) for pair in pairs)

    assert agreement(weighted_sum(rewards, weights), 1) > 0.999 > 0.5 > agreement(weighted_sum(rewards, weights), 0)
    both = [agreement(gdpo(rewards, weights), reward) for reward in (0, 1)]
    assert both[0] == pytest.approx(both[1], abs=1e-5) and 0.5 < both[0] < 0.9
    assert agreement(gdpo(rewards, torch.tensor([100.0, 1.0])), 0) > 0.999  # the weights decide
    assert extremes(gdpo(rewards, weights)) != extremes(weighted_sum(rewards, weights))


@pytest.mark.parametrize("factor", [1e-6, 0.01, 100.0, 1e6])
def test_another_unit_of_a_reward_changes_nothing(factor: float) -> None:
    weights, rewards = torch.tensor([1.0, 0.7]), scores(1.0, 1.0)
    other = rewards * torch.tensor([1.0, factor])
    torch.testing.assert_close(gdpo(other, weights), gdpo(rewards, weights), rtol=1e-5, atol=1e-5)
    assert torch.equal(select_contrastive(gdpo(other, weights), KEEP), select_contrastive(gdpo(rewards, weights), KEEP))
    moved = rewards + torch.tensor([0.0, 4.0])
    torch.testing.assert_close(gdpo(moved, weights), gdpo(rewards, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3])
def test_a_reward_that_is_constant_for_a_prompt_adds_nothing(value: float) -> None:
    rewards = scores(1.0, 1.0)
    rewards[1, :, 1] = value * (1 + 1e-7 * torch.randn(N))
    weights = torch.ones(2)
    assert torch.equal(gdpo(rewards, weights)[1], gdpo(rewards[..., :1], weights[:1])[1])
    assert not torch.allclose(gdpo(rewards, weights)[0], gdpo(rewards[..., :1], weights[:1])[0])
    assert torch.equal(gdpo(torch.full((P, N, 2), value), weights), torch.zeros(P, N))


def test_candidates_without_a_finite_score_do_not_count() -> None:
    rewards, weights = scores(1.0, 100.0), torch.ones(2)
    broken = rewards.clone()
    broken[0, 3, 1], broken[0, 7], broken[2] = torch.inf, torch.nan, torch.nan
    merits, left = gdpo(broken, weights), [i for i in range(N) if i not in (3, 7)]
    assert merits[0, [3, 7]].isnan().all() and merits[2].isnan().all()
    torch.testing.assert_close(merits[0, left], gdpo(rewards[:1, left], weights)[0])
    assert torch.equal(merits[1], gdpo(rewards, weights)[1])
    assert {3, 7}.isdisjoint(extremes(merits[:2])[0])


def test_single_rewards_rewards_of_weight_0_and_ranks_without_prompts() -> None:
    rewards, weight = scores(0.03, 100.0), torch.tensor([0.2])
    merits = gdpo(rewards[..., :1], weight)
    assert torch.equal(merits.argsort(1), weighted_sum(rewards[..., :1], weight).argsort(1))
    rewards[..., 1] = torch.nan
    assert torch.equal(gdpo(rewards, torch.tensor([0.2, 0.0])), merits)
    assert gdpo(torch.zeros(0, N, 2), torch.ones(2)).shape == (0, N)
