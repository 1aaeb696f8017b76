"""The RAM loss: an independent reference in float64, closed forms, and a value computed by hand."""

import pytest
import torch
from torch import Tensor

from solrl_lightning.objectives.ram import RAM, RAMLoss, ram_loss


def batch(seed: int = 0, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x0, eps, old, step, step_back = (torch.randn(rows, 3, 5, generator=generator) for _ in range(5))
    sigma = torch.rand(rows, generator=generator) * 0.9 + 0.05
    level = sigma[:, None, None]
    return {
        "velocity": (old + 0.3 * step).requires_grad_(),
        "old_velocity": old,
        "reference_velocity": old + 0.2 * step_back,
        "x0": x0,
        "x_t": (1 - level) * x0 + level * eps,
        "sigma": sigma,
        "advantage": torch.tensor([2.0, -1.0, 0.5, -7.0])[:rows],
    }


def gradient(result: RAMLoss, inputs: dict[str, Tensor]) -> Tensor:
    return torch.autograd.grad(result.loss, inputs["velocity"])[0]


@pytest.mark.parametrize("strength", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_match_the_equation_in_float64(strength: float, seed: int) -> None:
    """One sample at a time: |v - target|^2 with target = v_ref + r A (eps - x0 - v_old), gradient 2 (v - target)."""
    inputs = batch(seed)
    ours = ram_loss(**inputs, strength=strength)
    d = {name: value.detach().double() for name, value in inputs.items()}
    rows, gradients = [], []
    for b in range(4):
        direction = (d["x_t"][b] - (1 - d["sigma"][b]) * d["x0"][b]) / d["sigma"][b] - d["x0"][b]  # eps - x0
        target = d["reference_velocity"][b] + strength * d["advantage"][b] * (direction - d["old_velocity"][b])
        rows.append(((d["velocity"][b] - target) ** 2).mean())
        gradients.append(2 * (d["velocity"][b] - target) / target.numel() / 4)
    torch.testing.assert_close(ours.rows.double(), torch.stack(rows), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient(ours, inputs).double(), torch.stack(gradients), rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.loss, ours.rows.mean())


def test_an_average_sample_pulls_to_the_base_only() -> None:
    inputs = batch() | {"advantage": torch.zeros(4)}
    result = ram_loss(**inputs, strength=100.0)
    v = inputs["velocity"].detach().requires_grad_()
    distance = ((v - inputs["reference_velocity"]) ** 2).mean()
    torch.testing.assert_close(result.loss, distance)
    torch.testing.assert_close(gradient(result, inputs), torch.autograd.grad(distance, v)[0])
    assert float(result.correction) == 0 and float(result.kl) == pytest.approx(float(distance.detach()))


def test_at_the_base_the_gradient_is_that_of_advantage_weighted_flow_matching() -> None:
    """v = v_old = v_ref: the gradient of |v - target|^2 is r A times that of the flow-matching error |v - v*|^2."""
    inputs = batch()
    at_base = dict.fromkeys(("old_velocity", "reference_velocity"), inputs["old_velocity"])
    inputs |= at_base | {"velocity": inputs["old_velocity"].clone().requires_grad_()}
    result = ram_loss(**inputs, strength=3.0)
    v = inputs["velocity"].detach().requires_grad_()
    target = (inputs["x_t"] - inputs["x0"]) / inputs["sigma"][:, None, None]
    errors = ((v - target) ** 2).flatten(1).mean(1)
    expected = torch.autograd.grad((3.0 * inputs["advantage"] * errors).mean(), v)[0]
    torch.testing.assert_close(gradient(result, inputs), expected, rtol=1e-5, atol=1e-6)


def test_loss_matches_value_computed_by_hand() -> None:
    """x0 = 1, x_t = 1.5, sigma = 1/2: v* = 1. v_old = 0.5, v_ref = 0.25, A = -2, r = 3: target 0.25 - 6 * 0.5 = -2.75;
    v = 0.75 has distance 3.5 from it and 0.5 from v_ref."""
    one = torch.ones(1, 1)
    inputs = (0.75 * one, 0.5 * one, 0.25 * one, one, 1.5 * one, torch.tensor(0.5), torch.tensor([-2.0]))
    result = ram_loss(*inputs, strength=3.0)
    assert [float(value) for value in result._replace(rows=result.rows[0])] == [12.25, 12.25, 0.25, 9.0]


def test_only_velocity_has_gradients() -> None:
    inputs = batch()
    for name in ("old_velocity", "reference_velocity"):
        inputs[name] = inputs[name].clone().requires_grad_()
    result = ram_loss(**inputs, strength=1.0)
    result.loss.backward()
    assert inputs["velocity"].grad is not None
    assert inputs["old_velocity"].grad is None and inputs["reference_velocity"].grad is None
    assert not any(term.requires_grad for term in result[2:])


def test_both_other_velocities_are_read_in_every_micro_batch() -> None:
    objective = RAM(strength=1.0, timestep_fraction=0.2)
    assert objective.needs == {"old": 1, "reference": 1} and objective.forward_passes == 3
