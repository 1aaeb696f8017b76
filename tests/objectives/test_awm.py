"""The AWM loss: on-policy gradient, regularisers, clip and weighting."""

from typing import Any

import pytest
import torch
from losses import batch, gradient, target
from torch import Tensor

from solrl_lightning.objectives.awm import AWMLoss, awm_loss, ghuber


def loss(inputs: dict[str, Any], **settings: Any) -> AWMLoss:
    common = {"kl_weight": 0.0, "old_weight": 0.0, "advantage_clip": 5.0, "ratio_clip": 1.0, "weighting": uniform}
    return awm_loss(**inputs, **common | settings)


def uniform(error: Tensor, sigma: Tensor) -> Tensor:
    return error


def test_on_policy_gradient_is_advantage_times_gradient_of_matching_error() -> None:
    inputs = batch(old_velocity=None)
    result, v = loss(inputs), inputs["velocity"].detach().requires_grad_()
    weighted = inputs["advantage"].clamp(-5, 5) / 5 * ((v - target(inputs)) ** 2).flatten(1).mean(dim=1)
    expected = torch.autograd.grad(weighted.mean(), v)[0]
    torch.testing.assert_close(gradient(result, inputs), expected, rtol=1e-4, atol=1e-6)
    assert float(result.ratio) == 1 and float(result.clipped) == 0


def test_zero_advantage_leaves_only_regulariser_gradients() -> None:
    inputs = batch(advantage=torch.zeros(4))
    v = inputs["velocity"].detach().requires_grad_()
    pulls = 0.5 * (v - inputs["reference_velocity"]) ** 2 + 0.25 * (v - inputs["old_velocity"]) ** 2
    ours = gradient(loss(inputs, kl_weight=0.5, old_weight=0.25, weighting=ghuber), inputs)
    torch.testing.assert_close(ours, torch.autograd.grad(pulls.mean(), v)[0])


def test_clip_stops_gradient_of_positive_advantage_only() -> None:
    """At a ratio above the clip, positive advantages have no gradient and negative ones keep theirs."""
    one = torch.ones(2, 1)
    inputs = batch(
        velocity=(0.5 * one).requires_grad_(), old_velocity=0 * one, reference_velocity=None, x0=one, x_t=1.5 * one
    ) | {"sigma": torch.tensor(0.5), "advantage": torch.tensor([2.5, -2.5])}
    good, bad = gradient(loss(inputs, ratio_clip=0.2), inputs).flatten().tolist()
    assert good == 0
    assert bad == pytest.approx(0.5 * 2.1170000166 / 2, rel=1e-6)  # descent leads away from the target at 1


def test_weighting_matches_its_formula() -> None:
    error = torch.tensor([0.0, 0.5, 4.0], dtype=torch.float64)
    sigma = torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64)
    floor = 1e-10**0.25
    expected = [0.0, (0.5**0.25 - floor) * 0.25 / 0.25, (4**0.25 - floor) / 0.25]
    assert ghuber(error, sigma).tolist() == pytest.approx(expected, rel=1e-9)
