"""The AWM loss: on-policy gradient, clip, weighting, and a value computed by hand."""

import pytest
import torch
from torch import Tensor

from solrl_lightning.objectives.awm import awm_loss, ghuber

SETTINGS = {"kl_weight": 0.0, "old_weight": 0.0, "advantage_clip": 5.0, "ratio_clip": 1.0}


def uniform(error: Tensor, sigma: Tensor) -> Tensor:
    return error


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x0, eps, old, step, step_back = (torch.randn(4, 3, 5, generator=generator) for _ in range(5))
    sigma = torch.tensor([0.9, 0.6, 0.3, 0.1])
    level = sigma[:, None, None]
    return {
        "velocity": (old + 0.1 * step).requires_grad_(),
        "old_velocity": old,
        "reference_velocity": old + 0.2 * step_back,
        "x0": x0,
        "x_t": (1 - level) * x0 + level * eps,
        "sigma": sigma,
        "advantage": torch.tensor([2.0, -1.0, 0.5, -7.0]),
    }


def matching_error(v: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    target = (inputs["x_t"] - inputs["x0"]) / inputs["sigma"][:, None, None]
    return ((v - target) ** 2).flatten(1).mean(dim=1)


def test_on_policy_gradient_is_advantage_times_gradient_of_matching_error() -> None:
    inputs = batch()
    result = awm_loss(**inputs | {"old_velocity": None}, **SETTINGS, weighting=uniform)
    ours = torch.autograd.grad(result.loss, inputs["velocity"])[0]
    v = inputs["velocity"].detach().requires_grad_()
    weights = inputs["advantage"].clamp(-5, 5) / 5
    expected = torch.autograd.grad((weights * matching_error(v, inputs)).mean(), v)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert float(result.ratio) == 1 and float(result.clipped) == 0


def test_zero_advantage_leaves_only_regulariser_gradients() -> None:
    inputs = batch() | {"advantage": torch.zeros(4)}
    result = awm_loss(**inputs, **SETTINGS | {"kl_weight": 0.5, "old_weight": 0.25})
    v = inputs["velocity"].detach().requires_grad_()
    pulls = 0.5 * (v - inputs["reference_velocity"]) ** 2 + 0.25 * (v - inputs["old_velocity"]) ** 2
    expected = torch.autograd.grad(pulls.mean(), v)[0]
    torch.testing.assert_close(torch.autograd.grad(result.loss, inputs["velocity"])[0], expected)


def test_loss_matches_value_computed_by_hand() -> None:
    """x0 = 1, x_t = 1.5, sigma = 1/2: target 1. v = 0.5 and v_old = 0 have errors 0.25 and 1, so the ratio is e^0.75 =
    2.117; at A/5 = 1/2 and clip 0.2 the clipped branch counts, -0.5 * 1.2. KL to v_ref = 0.1: 0.16; to v_old: 0.25."""
    one = torch.ones(1, 1)
    result = awm_loss(
        0.5 * one, 0 * one, 0.1 * one, one, 1.5 * one, torch.tensor(0.5), torch.tensor([2.5]),
        kl_weight=0.1, old_weight=1.0, advantage_clip=5.0, ratio_clip=0.2, weighting=uniform,
    )  # fmt: skip
    values = [float(value) for value in result._replace(rows=result.rows[0])]
    assert values == pytest.approx([-0.334, -0.334, -0.6, 0.16, 0.25, 2.1170000166, 1.0], rel=1e-6)


def test_clip_stops_gradient_of_positive_advantage_only() -> None:
    """At a ratio above the clip, positive advantages have no gradient and negative ones keep theirs."""
    one = torch.ones(2, 1)
    v = (0.5 * one).requires_grad_()
    result = awm_loss(
        v, 0 * one, None, one, 1.5 * one, torch.tensor(0.5), torch.tensor([2.5, -2.5]),
        **SETTINGS | {"ratio_clip": 0.2}, weighting=uniform,
    )  # fmt: skip
    good, bad = torch.autograd.grad(result.loss, v)[0].flatten().tolist()
    assert good == 0
    assert bad == pytest.approx(0.5 * 2.1170000166 / 2, rel=1e-6)  # descent leads away from the target at 1


def test_the_weighting_matches_its_formula() -> None:
    error = torch.tensor([0.0, 0.5, 4.0], dtype=torch.float64)
    sigma = torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64)
    floor = 1e-10**0.25
    expected = [0.0, (0.5**0.25 - floor) * 0.25 / 0.25, (4**0.25 - floor) / 0.25]
    assert ghuber(error, sigma).tolist() == pytest.approx(expected, rel=1e-9)


def test_only_velocity_has_gradients_and_loss_is_mean_of_rows() -> None:
    inputs = batch()
    for name in ("old_velocity", "reference_velocity"):
        inputs[name] = inputs[name].clone().requires_grad_()
    result = awm_loss(**inputs, **SETTINGS | {"kl_weight": 0.1, "old_weight": 0.1})
    result.loss.backward()
    assert inputs["velocity"].grad is not None
    assert inputs["old_velocity"].grad is None and inputs["reference_velocity"].grad is None
    assert torch.equal(result.rows.mean(), result.loss)
    assert not any(term.requires_grad for term in result[2:])


def test_nonzero_weight_without_velocity_raises() -> None:
    with pytest.raises(ValueError, match="kl_weight=0.1 needs the reference velocity"):
        awm_loss(**batch() | {"reference_velocity": None}, **SETTINGS | {"kl_weight": 0.1})
    with pytest.raises(ValueError, match="old_weight=0.1 needs the old policy's velocity"):
        awm_loss(**batch() | {"old_velocity": None}, **SETTINGS | {"old_weight": 0.1})
