"""The PEPG loss: an independent reference in float64, and its equalities with NFT and PAR."""

import pytest
import torch
from losses import batch, double, gradient
from torch import Tensor

from solrl_lightning.objectives.nft import nft_loss
from solrl_lightning.objectives.pepg import pepg_loss

SETTINGS = {"kl_weight": 0.0, "advantage_scale": 1.0}
ADVANTAGE = torch.tensor([2.0, -1.0, 0.5, -4.0])


def log_likelihood(v: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """[B], with the weight of each sample as a number."""
    error = inputs["x_t"] - inputs["sigma"][:, None, None] * v - inputs["x0"]
    weight = error.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
    return -error.square().flatten(1).mean(1) / weight


def log_ratio(v: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return log_likelihood(v, inputs) - log_likelihood(inputs["old_velocity"], inputs)


@pytest.mark.parametrize("scale", [0.1, 1.0])
@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_match_equations_in_float64(scale: float, kl_weight: float, seed: int) -> None:
    inputs = batch(seed, advantage=ADVANTAGE)
    ours, doubles = pepg_loss(**inputs, kl_weight=kl_weight, advantage_scale=scale), double(inputs)
    v = doubles["velocity"]
    d = log_ratio(v, doubles).detach()
    rows = -d.exp() * (scale * doubles["advantage"] - d) * log_likelihood(v, doubles)
    rows = rows + kl_weight * ((v - doubles["reference_velocity"]) ** 2).flatten(1).mean(1)
    torch.testing.assert_close(ours.rows.double(), rows, rtol=1e-5, atol=1e-6)
    assert (d > 0).any() and (d < 0).any()
    assert float(ours.log_ratio) == pytest.approx(float(d.abs().mean()), rel=1e-5)
    expected = torch.autograd.grad(rows.mean(), v)[0]
    torch.testing.assert_close(gradient(ours, inputs).double(), expected, rtol=1e-4, atol=1e-6)


def test_par_has_the_same_gradient() -> None:
    """PAR is exp(D) (A - (l - l_old))^2 / 2 with a detached exp(D); it differs from PEPG in value only."""
    inputs = batch(advantage=ADVANTAGE)
    v = inputs["velocity"].detach().requires_grad_()
    d = log_ratio(v, inputs)
    par = (0.5 * d.detach().exp() * (inputs["advantage"] - d) ** 2).mean()
    ours = gradient(pepg_loss(**inputs, **SETTINGS), inputs)
    torch.testing.assert_close(ours, torch.autograd.grad(par, v)[0], rtol=1e-4, atol=1e-6)


def test_at_the_old_policy_the_gradient_is_that_of_nft() -> None:
    """v = v_old: D = 0, and NFT's two branches add up to A times the gradient of the error."""
    inputs = batch(at_old=True, advantage=ADVANTAGE)
    result = pepg_loss(**inputs, **SETTINGS)
    expected = gradient(nft_loss(**inputs, beta=1.0, kl_weight=0.0, advantage_clip=5.0), inputs)
    torch.testing.assert_close(gradient(result, inputs), expected, rtol=1e-4, atol=1e-6)
    assert float(result.log_ratio) == 0 and float(result.drift) == 0


def test_pull_ends_where_the_log_ratio_is_the_advantage() -> None:
    inputs = batch()
    reached = log_ratio(inputs["velocity"].detach(), inputs)
    beyond, there, short = (
        gradient(pepg_loss(**inputs | {"advantage": reached + offset}, **SETTINGS), inputs) for offset in (-1, 0, 1)
    )
    assert float(there.abs().max()) < 1e-6
    torch.testing.assert_close(beyond, -short, rtol=1e-4, atol=1e-6)
