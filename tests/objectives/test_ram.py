"""The RAM loss: an independent reference in float64, and closed forms."""

import pytest
import torch
from losses import batch, double, gradient, target

from solrl_lightning.objectives.ram import RAM, ram_loss


@pytest.mark.parametrize("strength", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_match_the_equation_in_float64(strength: float, seed: int) -> None:
    """One sample at a time: |v - target|^2 with target = v_ref + r A (eps - x0 - v_old), gradient 2 (v - target)."""
    inputs = batch(seed)
    ours = ram_loss(**inputs, strength=strength)
    rows, gradients = [], []
    for v, v_old, v_ref, x0, x_t, sigma, advantage in zip(*double(inputs).values(), strict=True):
        direction = (x_t - (1 - sigma) * x0) / sigma - x0  # eps - x0
        target = v_ref + strength * advantage * (direction - v_old)
        rows.append(((v.detach() - target) ** 2).mean())
        gradients.append(2 * (v.detach() - target) / target.numel() / 4)
    torch.testing.assert_close(ours.rows.double(), torch.stack(rows), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient(ours, inputs).double(), torch.stack(gradients), rtol=1e-5, atol=1e-6)


def test_zero_advantage_pulls_to_the_base_only() -> None:
    inputs = batch(advantage=torch.zeros(4))
    result = ram_loss(**inputs, strength=100.0)
    distance = ((inputs["velocity"] - inputs["reference_velocity"]) ** 2).mean()
    torch.testing.assert_close(result.loss, distance)
    assert float(result.correction) == 0 and float(result.kl) == pytest.approx(float(distance.detach()))


def test_at_the_base_the_gradient_is_that_of_advantage_weighted_flow_matching() -> None:
    """v = v_old = v_ref: the gradient of |v - target|^2 is r A times that of the flow-matching error |v - v*|^2."""
    inputs = batch(at_old=True, reference_velocity=batch()["old_velocity"])
    v = inputs["velocity"].detach().requires_grad_()
    errors = ((v - target(inputs)) ** 2).flatten(1).mean(1)
    expected = torch.autograd.grad((3.0 * inputs["advantage"] * errors).mean(), v)[0]
    torch.testing.assert_close(gradient(ram_loss(**inputs, strength=3.0), inputs), expected, rtol=1e-5, atol=1e-6)


def test_old_and_reference_velocities_are_read_in_every_micro_batch() -> None:
    objective = RAM(strength=1.0, timestep_fraction=0.2)
    assert objective.needs == {"old": 1, "reference": 1} and objective.forward_passes == 3
