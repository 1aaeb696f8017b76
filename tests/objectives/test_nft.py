"""The DiffusionNFT loss: closed forms, and an independent reference in float64."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from losses import batch, double, gradient, target
from torch import Tensor

from solrl_lightning.objectives.awm import AWM
from solrl_lightning.objectives.nft import NFT, NFTLoss, nft_loss


def loss(inputs: dict[str, Any], **settings: float) -> NFTLoss:
    return nft_loss(**inputs, **{"beta": 1.0, "kl_weight": 0.0, "advantage_clip": 5.0} | settings)


def straightforward(inputs: dict[str, Tensor], beta: float, kl_weight: float, clip: float = 5.0) -> Tensor:
    """Return the loss by the equations, one sample at a time."""
    rows = []
    for v, v_old, v_ref, x0, x_t, sigma, advantage in zip(*inputs.values(), strict=True):
        losses = []
        for sign in (1, -1):
            predicted = x_t - sigma * (v_old + sign * beta * (v - v_old))
            weight = max(float((predicted - x0).detach().abs().mean()), 1e-5)
            losses.append(((predicted - x0) ** 2 / weight).mean())
        r = min(max(float(advantage) / clip, -1), 1) / 2 + 0.5
        policy = clip * (r * losses[0] + (1 - r) * losses[1]) / beta
        rows.append(policy + kl_weight * ((v - v_ref) ** 2).mean())
    return torch.stack(rows).mean()


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize("kl_weight", [0.0, 1e-4, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_match_equations_in_float64(beta: float, kl_weight: float, seed: int) -> None:
    inputs = batch(seed)
    ours, doubles = loss(inputs, beta=beta, kl_weight=kl_weight), double(inputs)
    theirs = straightforward(doubles, beta, kl_weight)
    torch.testing.assert_close(ours.loss.double(), theirs, rtol=1e-6, atol=0)
    expected = torch.autograd.grad(theirs, doubles["velocity"])[0]
    torch.testing.assert_close(gradient(ours, inputs).double(), expected, rtol=1e-5, atol=1e-6)


def test_at_old_policy_value_is_independent_of_advantage() -> None:
    first = loss(batch(at_old=True))
    second = loss(batch(at_old=True, advantage=torch.tensor([-3.0, 4.0, 0.0, 1.0])))
    assert torch.equal(first.positive, first.negative) and float(first.drift) == 0
    torch.testing.assert_close(first.rows, second.rows, rtol=1e-6, atol=0)


def test_at_old_policy_gradient_is_proportional_to_2r_minus_1_and_leads_to_the_target() -> None:
    full = batch(at_old=True, advantage=torch.full((4,), 5.0))  # r = 1
    unit = gradient(loss(full), full)
    assert bool(((-unit * (target(full) - full["old_velocity"])).flatten(1).sum(1) > 0).all())
    for advantage in (-5.0, -2.0, 0.0, 1.0, 3.0):
        inputs = batch(at_old=True, advantage=torch.full((4,), advantage))
        torch.testing.assert_close(gradient(loss(inputs), inputs), advantage / 5 * unit, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_at_old_policy_beta_scales_value_and_not_gradient(beta: float) -> None:
    inputs = batch(at_old=True)
    plain, scaled = loss(inputs), loss(inputs, beta=beta)
    torch.testing.assert_close(scaled.loss * beta, plain.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient(scaled, inputs), gradient(plain, inputs), rtol=1e-5, atol=1e-7)


def test_zero_advantage_pulls_back_to_old_policy() -> None:
    """With r = 1/2 the two mirrored errors are least where the branches meet, if their weights are equal."""
    inputs = batch(advantage=torch.zeros(4))
    away = inputs["velocity"].detach() - inputs["old_velocity"]
    assert bool(((-gradient(loss(inputs), inputs) * away).flatten(1).sum(1) < 0).all())


def test_advantages_are_clipped() -> None:
    beyond = loss(batch(advantage=torch.tensor([9.0, -9.0, math.inf, -math.inf])))
    at_clip = loss(batch(advantage=torch.tensor([5.0, -5.0, 5.0, -5.0])))
    assert torch.equal(beyond.rows, at_clip.rows)
    assert (float(beyond.clipped), float(at_clip.clipped)) == (1, 0)


def test_effective_kl_weight_is_divided_by_advantage_clip() -> None:
    """Advantages scaled with the clip give the same r: then loss / clip has its KL weight divided by the clip."""
    at_one = batch(advantage=batch()["advantage"].clamp(-5, 5) / 5)
    with_one = loss(at_one, kl_weight=0.5 / 5, advantage_clip=1.0)
    torch.testing.assert_close(loss(batch(), kl_weight=0.5).loss / 5, with_one.loss, rtol=1e-6, atol=0)


def test_exact_prediction_has_zero_loss_and_finite_gradient() -> None:
    exact = target(batch())
    inputs = batch(velocity=exact.clone().requires_grad_(), old_velocity=exact)
    result = loss(inputs)
    assert float(result.loss.detach()) == pytest.approx(0, abs=1e-6)
    assert gradient(result, inputs).isfinite().all()


def test_bfloat16_velocities_are_cast_to_float32_and_nan_propagates() -> None:
    low = {name: value.detach().bfloat16() if "velocity" in name else value for name, value in batch().items()}
    low["velocity"][1, 0, 0] = math.nan
    rows = loss(low).rows
    assert rows.dtype == torch.float32 and rows.isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(rows, loss({k: v.float() for k, v in low.items()}).rows, rtol=0, atol=0, equal_nan=True)


RARE = {"kl_weight": 0.1, "reference_every": 3}


@pytest.mark.parametrize("objective", [NFT(1.0, 5.0, **RARE), AWM(1.0, 5.0, 1.0, **RARE)])
def test_rare_reference_weighs_more_and_its_mean_is_the_term_itself(objective: NFT | AWM) -> None:
    assert objective.needs == {"old": 1, "reference": 3} and replace(objective, kl_weight=0.0).needs == {"old": 1}
    assert objective.forward_passes == pytest.approx(2 + 1 / 3)
    inputs = batch()
    training = SimpleNamespace(**inputs)
    velocity, old, reference = (inputs[f"{name}velocity"] for name in ("", "old_", "reference_"))
    always = replace(objective, reference_every=1)(velocity, training, old=old, reference=reference)
    never = objective(velocity, training, old=old)
    now = objective(velocity, training, old=old, reference=reference)
    torch.testing.assert_close((2 * never.per_sample + now.per_sample) / 3, always.per_sample)
    assert "kl" in now.metrics and "kl" not in never.metrics
    assert "kl" in replace(objective, kl_weight=0.0)(velocity, training, old=old).metrics
