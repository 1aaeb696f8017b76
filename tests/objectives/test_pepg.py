"""The PEPG loss: an independent reference in float64, its equalities with NFT and PAR, a value computed by hand."""

import pytest
import torch
from torch import Tensor

from solrl_lightning.objectives.nft import nft_loss
from solrl_lightning.objectives.pepg import PEPGLoss, pepg_loss

SETTINGS = {"kl_weight": 0.0, "advantage_scale": 1.0}


def batch(seed: int = 0, rows: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x0, eps, old, step, step_back = (torch.randn(rows, 3, 5, generator=generator, dtype=dtype) for _ in range(5))
    sigma = torch.rand(rows, generator=generator, dtype=dtype) * 0.9 + 0.05
    level = sigma[:, None, None]
    return {
        "velocity": (old + 0.3 * step).requires_grad_(),
        "old_velocity": old,
        "reference_velocity": old + 0.2 * step_back,
        "x0": x0,
        "x_t": (1 - level) * x0 + level * eps,
        "sigma": sigma,
        "advantage": torch.tensor([2.0, -1.0, 0.5, -4.0], dtype=dtype)[:rows],
    }


def gradient(result: PEPGLoss, inputs: dict[str, Tensor]) -> Tensor:
    return torch.autograd.grad(result.loss, inputs["velocity"])[0]


def log_likelihood(v: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """[B], with the weight of each sample as a number."""
    error = inputs["x_t"] - inputs["sigma"][:, None, None] * v - inputs["x0"]
    weight = error.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
    return -error.square().flatten(1).mean(1) / weight


@pytest.mark.parametrize("scale", [0.1, 1.0])
@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_match_equations_in_float64(scale: float, kl_weight: float, seed: int) -> None:
    inputs = batch(seed)
    ours = pepg_loss(**inputs, kl_weight=kl_weight, advantage_scale=scale)
    doubles = {name: value.detach().double() for name, value in inputs.items()}
    v = doubles["velocity"].requires_grad_()
    likelihood = log_likelihood(v, doubles)
    log_ratio = (likelihood - log_likelihood(doubles["old_velocity"], doubles)).detach()
    rows = -log_ratio.exp() * (scale * doubles["advantage"] - log_ratio) * likelihood
    rows = rows + kl_weight * ((v - doubles["reference_velocity"]) ** 2).flatten(1).mean(1)
    torch.testing.assert_close(ours.rows.double(), rows, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(rows.mean(), v)[0]
    torch.testing.assert_close(gradient(ours, inputs).double(), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(ours.loss, ours.rows.mean())


def test_par_has_the_same_gradient() -> None:
    """PAR is exp(D) (A - (l - l_old))^2 / 2 with a detached exp(D); it differs from PEPG in value only."""
    inputs = batch()
    v = inputs["velocity"].detach().requires_grad_()
    log_ratio = log_likelihood(v, inputs) - log_likelihood(inputs["old_velocity"], inputs)
    par = (0.5 * log_ratio.detach().exp() * (inputs["advantage"] - log_ratio) ** 2).mean()
    ours = gradient(pepg_loss(**inputs, **SETTINGS), inputs)
    torch.testing.assert_close(ours, torch.autograd.grad(par, v)[0], rtol=1e-4, atol=1e-6)


def test_at_the_old_policy_the_gradient_is_that_of_nft() -> None:
    """v = v_old: D = 0, and NFT's two branches add up to A times the gradient of the error."""
    inputs = batch()
    inputs["velocity"] = inputs["old_velocity"].clone().requires_grad_()
    result = pepg_loss(**inputs, **SETTINGS)
    nft = nft_loss(**inputs, beta=1.0, kl_weight=0.0, advantage_clip=5.0)
    expected = torch.autograd.grad(nft.loss, inputs["velocity"])[0]
    torch.testing.assert_close(gradient(result, inputs), expected, rtol=1e-4, atol=1e-6)
    assert float(result.log_ratio) == 0 and float(result.drift) == 0


def test_the_pull_ends_where_the_log_ratio_is_the_advantage() -> None:
    inputs = batch()
    v, old = inputs["velocity"].detach(), inputs["old_velocity"]
    reached = log_likelihood(v, inputs) - log_likelihood(old, inputs)
    result = pepg_loss(**inputs | {"advantage": reached}, **SETTINGS)
    assert float(gradient(result, inputs).abs().max()) < 1e-6
    beyond = gradient(pepg_loss(**inputs | {"advantage": reached - 1}, **SETTINGS), inputs)
    short = gradient(pepg_loss(**inputs | {"advantage": reached + 1}, **SETTINGS), inputs)
    torch.testing.assert_close(beyond, -short, rtol=1e-4, atol=1e-6)


def test_zero_advantage_at_the_old_policy_leaves_the_regulariser_only() -> None:
    inputs = batch() | {"advantage": torch.zeros(4)}
    inputs["velocity"] = inputs["old_velocity"].clone().requires_grad_()
    result = pepg_loss(**inputs, **SETTINGS | {"kl_weight": 0.5})
    v = inputs["velocity"].detach().requires_grad_()
    expected = torch.autograd.grad(0.5 * ((v - inputs["reference_velocity"]) ** 2).mean(), v)[0]
    torch.testing.assert_close(gradient(result, inputs), expected)


def test_loss_matches_value_computed_by_hand() -> None:
    """x0 = 1, x_t = 1.5, sigma = 1/2: x0 predictions 1.25 and 1.5 of v = 0.5 and v_old = 0 have normalised errors 0.25
    and 0.5, so D = 0.25; A = 2 * 0.5: -e^0.25 (1 - 0.25) (-0.25) = 0.24075. KL to v_ref = 0.1: 0.16."""
    one = torch.ones(1, 1)
    inputs = (0.5 * one, 0 * one, 0.1 * one, one, 1.5 * one, torch.tensor(0.5), torch.tensor([2.0]))
    result = pepg_loss(*inputs, kl_weight=0.1, advantage_scale=0.5)
    values = [float(value) for value in result._replace(rows=result.rows[0])]
    assert values == pytest.approx([0.2567548, 0.2567548, 0.2407548, 0.16, 0.25, -0.25, 0.25], rel=1e-6)


def test_only_velocity_has_gradients() -> None:
    inputs = batch()
    for name in ("old_velocity", "reference_velocity"):
        inputs[name] = inputs[name].clone().requires_grad_()
    result = pepg_loss(**inputs, **SETTINGS | {"kl_weight": 0.1})
    result.loss.backward()
    assert inputs["velocity"].grad is not None
    assert inputs["old_velocity"].grad is None and inputs["reference_velocity"].grad is None
    assert not any(term.requires_grad for term in result[2:])


def test_nonzero_kl_weight_without_reference_raises() -> None:
    with pytest.raises(ValueError, match="kl_weight=0.1 needs the reference velocity"):
        pepg_loss(**batch() | {"reference_velocity": None}, **SETTINGS | {"kl_weight": 0.1})
    assert float(pepg_loss(**batch() | {"reference_velocity": None}, **SETTINGS).kl) == 0
