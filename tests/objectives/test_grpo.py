"""The GRPO loss against closed forms, and what flow_grpo and dance_grpo train on."""

import math

import pytest
import torch
from torch import Tensor

from solrl_lightning.objectives.advantages import per_prompt_advantages
from solrl_lightning.objectives.dance_grpo import DanceGRPO
from solrl_lightning.objectives.flow_grpo import FlowGRPO
from solrl_lightning.objectives.grpo import GRPOLoss, grpo_loss
from solrl_lightning.sampling.sde import log_prob

GENERATOR = torch.Generator().manual_seed(0)
NEXT, MEAN, REFERENCE = (torch.randn(4, 3, 2, generator=GENERATOR, dtype=torch.float64) for _ in range(3))
STD = torch.tensor([0.2, 0.3, 0.5, 0.7], dtype=torch.float64)
A = torch.tensor([2.0, -1.0, 0.5, -9.0], dtype=torch.float64)


def loss(new: Tensor, old: Tensor, mean: Tensor = MEAN, reference: Tensor | None = None, kl: float = 0.0) -> GRPOLoss:
    return grpo_loss(new, old, mean, reference, STD, A, clip_range=1e-4, kl_weight=kl, advantage_clip=5.0)


def test_equal_policies_give_the_policy_gradient_of_clipped_advantages() -> None:
    new = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    terms = loss(new, torch.zeros(4, dtype=torch.float64))
    clipped = A.clamp(-5, 5)
    assert torch.equal(terms.ratio, torch.ones(4, dtype=torch.float64)) and float(terms.clipped) == 0
    torch.testing.assert_close(terms.rows, -clipped)
    (gradient,) = torch.autograd.grad(terms.loss, new)
    torch.testing.assert_close(gradient, -clipped / 4)


def test_ratio_beyond_clip_gets_no_gradient_where_it_already_pays() -> None:
    new = torch.tensor([2e-4, -2e-4, -2e-4, 2e-4], dtype=torch.float64, requires_grad=True)
    terms = loss(new, torch.zeros(4, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(terms.loss, new)
    assert float(terms.clipped) == 1
    assert gradient[:2].tolist() == [0, 0]  # better and more probable; worse and less probable
    torch.testing.assert_close(gradient[2:], -A.clamp(-5, 5)[2:] * new[2:].exp() / 4)


def test_loss_equals_an_independent_formula() -> None:
    old = log_prob(NEXT, MEAN + 1e-4, STD)
    terms = loss(log_prob(NEXT, MEAN, STD), old, reference=REFERENCE, kl=0.04)
    expected = []
    for b in range(4):
        new, before = (-((NEXT[b] - MEAN[b] - shift) ** 2).mean() / (2 * STD[b] ** 2) for shift in (0.0, 1e-4))
        ratio, a = math.exp(new - before), min(max(float(A[b]), -5), 5)
        kl = float(((MEAN[b] - REFERENCE[b]) ** 2).mean()) / (2 * float(STD[b]) ** 2)
        expected.append(max(-a * ratio, -a * min(max(ratio, 1 - 1e-4), 1 + 1e-4)) + 0.04 * kl)
    torch.testing.assert_close(terms.rows, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    assert float(terms.loss) == pytest.approx(sum(expected) / 4, rel=1e-10)


def test_kl_needs_a_reference() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"kl_weight=0.1 needs the reference mean; pass it or set kl_weight=0"):
        loss(zeros, zeros, kl=0.1)


def flow_grpo(window: int | None, seed: int = 1) -> FlowGRPO:
    return FlowGRPO(kl_weight=0.0, clip_range=1e-4, advantage_clip=5.0, noise_level=0.7, window=window, seed=seed)


def test_windows_lie_in_the_first_half_and_move_with_iteration_and_seed() -> None:
    assert flow_grpo(None).transitions(10, 3) == range(9)
    places = [flow_grpo(2).transitions(10, iteration) for iteration in range(40)]
    assert {len(place) for place in places} == {2}
    assert {place.start for place in places} == {0, 1, 2, 3}
    assert places != [flow_grpo(2, seed=2).transitions(10, iteration) for iteration in range(40)]


def test_rows_per_sample_are_the_trained_transitions() -> None:
    dance = DanceGRPO(kl_weight=0, clip_range=1e-4, advantage_clip=5, timestep_fraction=0.6, eta=0.3, shared_noise=True)
    assert (flow_grpo(None).rows_per_sample(10), flow_grpo(2).rows_per_sample(10)) == (9, 2)
    assert dance.rows_per_sample(16) == 9


def test_per_prompt_advantages() -> None:
    rewards = torch.tensor([[1.0, 2.0, 6.0], [4.0, 4.0, 4.0]])
    deviation = math.sqrt((4 + 1 + 9) / 2)
    expected = torch.tensor([[-2 / deviation, -1 / deviation, 3 / deviation], [0, 0, 0]])
    torch.testing.assert_close(per_prompt_advantages(rewards), expected)
