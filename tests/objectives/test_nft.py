"""The DiffusionNFT loss: closed forms, a value computed by hand, and an independent reference in float64."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from solrl_lightning.objectives.awm import AWM
from solrl_lightning.objectives.nft import NFT, NFTLoss, nft_loss

SETTINGS = {"beta": 1.0, "kl_weight": 1e-4, "advantage_clip": 5.0}


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


def at_old_policy(**changes: Tensor) -> dict[str, Tensor]:
    inputs = batch() | changes
    return inputs | {"velocity": inputs["old_velocity"].clone().requires_grad_()}


def gradient(result: NFTLoss, inputs: dict[str, Tensor]) -> Tensor:
    return torch.autograd.grad(result.loss, inputs["velocity"])[0]


def straightforward(
    v: Tensor,
    v_old: Tensor,
    v_ref: Tensor,
    x0: Tensor,
    x_t: Tensor,
    sigma: Tensor,
    advantage: Tensor,
    **settings: float,
) -> Tensor:
    """Return the loss by the equations, one sample at a time in float64."""
    beta, clip = settings["beta"], settings["advantage_clip"]
    total = torch.zeros((), dtype=torch.float64)
    for b in range(len(x0)):
        losses = []
        for sign in (1, -1):
            implicit = v_old[b] + sign * beta * (v[b] - v_old[b])
            predicted = x_t[b] - sigma[b] * implicit
            weight = max(float((predicted - x0[b]).detach().abs().mean()), 1e-5)
            losses.append(((predicted - x0[b]) ** 2 / weight).mean())
        r = min(max(float(advantage[b]) / clip, -1), 1) / 2 + 0.5
        total = total + clip * (r * losses[0] + (1 - r) * losses[1]) / beta
        total = total + settings["kl_weight"] * ((v[b] - v_ref[b]) ** 2).mean()
    return total / len(x0)


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize("kl_weight", [0.0, 1e-4, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_match_equations_in_float64(beta: float, kl_weight: float, seed: int) -> None:
    inputs = batch(seed)
    settings = {"beta": beta, "kl_weight": kl_weight, "advantage_clip": 5.0}
    ours = nft_loss(**inputs, **settings)
    doubles = {name: value.detach().double() for name, value in inputs.items()}
    v = doubles.pop("velocity").requires_grad_()
    theirs = straightforward(v, *doubles.values(), **settings)
    torch.testing.assert_close(ours.loss.double(), theirs, rtol=1e-6, atol=0)
    expected = torch.autograd.grad(theirs, v)[0]
    torch.testing.assert_close(gradient(ours, inputs).double(), expected, rtol=1e-5, atol=1e-6)


def test_loss_matches_value_computed_by_hand() -> None:
    """x0 = 1, eps = 2, sigma = 1/2: x_t = 1.5. v_old = 0, v = 0.5: v+ = 0.5, v- = -0.5, so the predictions are 1.25 and
    1.75, their errors 0.25 and 0.75, and error^2 / |error| the same. A = 2.5 gives r = 0.75. Policy: 5 (0.75 * 0.25 +
    0.25 * 0.75) = 1.875. KL with v_ref = 0.1: 0.16, times 0.01."""
    one = torch.ones(1, 1)
    result = nft_loss(
        0.5 * one, 0 * one, 0.1 * one, one, 1.5 * one, torch.tensor(0.5), torch.tensor([2.5]),
        beta=1.0, kl_weight=0.01, advantage_clip=5.0,
    )  # fmt: skip
    values = [float(value) for value in result._replace(rows=result.rows[0])]
    assert values == pytest.approx([1.8766, 1.8766, 1.875, 0.16, 0.25, 0.75, 0.25, 0], rel=1e-6)


def test_at_old_policy_value_is_independent_of_advantage() -> None:
    first = nft_loss(**at_old_policy(), **SETTINGS)
    second = nft_loss(**at_old_policy(advantage=torch.tensor([-3.0, 4.0, 0.0, 1.0])), **SETTINGS)
    assert torch.equal(first.positive, first.negative)
    assert float(first.drift) == 0
    torch.testing.assert_close(first.rows, second.rows, rtol=1e-6, atol=0)


def test_at_old_policy_zero_advantage_has_no_gradient() -> None:
    inputs = at_old_policy(advantage=torch.zeros(4))
    assert float(gradient(nft_loss(**inputs, **SETTINGS | {"kl_weight": 0.0}), inputs).abs().max()) < 1e-6


def test_zero_advantage_pulls_back_to_old_policy() -> None:
    """With r = 1/2 the two mirrored errors are least where the branches meet, if their weights are equal."""
    inputs = batch() | {"advantage": torch.zeros(4)}
    pull = -gradient(nft_loss(**inputs, **SETTINGS | {"kl_weight": 0.0}), inputs)
    away = inputs["velocity"].detach() - inputs["old_velocity"]
    assert all(float((pull[b] * away[b]).sum()) < 0 for b in range(4))


def test_at_old_policy_gradient_is_proportional_to_2r_minus_1() -> None:
    settings = SETTINGS | {"kl_weight": 0.0}
    full = at_old_policy(advantage=torch.full((4,), 5.0))  # r = 1
    unit = gradient(nft_loss(**full, **settings), full)
    for advantage in (-5.0, -2.0, 1.0, 3.0):
        inputs = at_old_policy(advantage=torch.full((4,), advantage))
        ours = gradient(nft_loss(**inputs, **settings), inputs)
        torch.testing.assert_close(ours, advantage / 5 * unit, rtol=1e-5, atol=1e-7)


def test_at_old_policy_positive_advantage_moves_velocity_to_target() -> None:
    inputs = at_old_policy(advantage=torch.tensor([1.0, 1.0, -1.0, -1.0]))
    descent = -gradient(nft_loss(**inputs, **SETTINGS | {"kl_weight": 0.0}), inputs)
    target = (inputs["x_t"] - inputs["x0"]) / inputs["sigma"][:, None, None]
    towards = (descent * (target - inputs["old_velocity"])).flatten(1).sum(dim=1)
    assert (towards.sign() == inputs["advantage"]).all()


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_at_old_policy_beta_scales_value_and_not_gradient(beta: float) -> None:
    one, other = at_old_policy(), at_old_policy()
    plain = nft_loss(**one, **SETTINGS | {"kl_weight": 0.0})
    scaled = nft_loss(**other, **SETTINGS | {"kl_weight": 0.0, "beta": beta})
    torch.testing.assert_close(scaled.loss * beta, plain.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient(scaled, other), gradient(plain, one), rtol=1e-5, atol=1e-7)


def test_advantages_are_clipped() -> None:
    beyond = nft_loss(**batch() | {"advantage": torch.tensor([9.0, -9.0, math.inf, -math.inf])}, **SETTINGS)
    at_clip = nft_loss(**batch() | {"advantage": torch.tensor([5.0, -5.0, 5.0, -5.0])}, **SETTINGS)
    assert torch.equal(beyond.rows, at_clip.rows)
    assert (float(beyond.clipped), float(at_clip.clipped)) == (1, 0)


def test_effective_kl_weight_is_divided_by_advantage_clip() -> None:
    """Advantages scaled with the clip give the same r: then loss / clip has its KL weight divided by the clip."""
    at_one = batch() | {"advantage": batch()["advantage"].clamp(-5, 5) / 5}
    with_five = nft_loss(**batch(), beta=1.0, kl_weight=0.5, advantage_clip=5.0)
    with_one = nft_loss(**at_one, beta=1.0, kl_weight=0.5 / 5, advantage_clip=1.0)
    torch.testing.assert_close(with_five.loss / 5, with_one.loss, rtol=1e-6, atol=0)


def test_rows_are_independent_and_average_to_loss() -> None:
    inputs = batch()
    result = nft_loss(**inputs, **SETTINGS)
    assert torch.equal(result.rows.mean(), result.loss)
    alone = nft_loss(**{name: value[2:3] for name, value in inputs.items()}, **SETTINGS)
    torch.testing.assert_close(alone.rows, result.rows[2:3], rtol=1e-6, atol=0)


def test_only_velocity_has_gradients() -> None:
    inputs = {name: value.detach().clone().requires_grad_() for name, value in batch().items()}
    inputs["sigma"], inputs["x0"], inputs["x_t"] = (inputs[name].detach() for name in ("sigma", "x0", "x_t"))
    result = nft_loss(**inputs, **SETTINGS)
    result.loss.backward()
    assert inputs["velocity"].grad is not None
    assert inputs["old_velocity"].grad is None and inputs["reference_velocity"].grad is None
    assert not any(term.requires_grad for term in result[2:])


def test_reference_is_optional_without_kl_weight() -> None:
    settings = SETTINGS | {"kl_weight": 0.0}
    without = nft_loss(**batch() | {"reference_velocity": None}, **settings)
    assert torch.equal(without.rows, nft_loss(**batch(), **settings).rows)
    assert float(without.kl) == 0
    with pytest.raises(ValueError, match="kl_weight=0.0001 needs the reference velocity"):
        nft_loss(**batch() | {"reference_velocity": None}, **SETTINGS)


def test_exact_prediction_has_zero_loss_and_finite_gradient() -> None:
    inputs = batch()
    target = (inputs["x_t"] - inputs["x0"]) / inputs["sigma"][:, None, None]
    inputs = inputs | {"velocity": target.clone().requires_grad_(), "old_velocity": target}
    result = nft_loss(**inputs, **SETTINGS | {"kl_weight": 0.0})
    assert float(result.loss.detach()) == pytest.approx(0, abs=1e-6)
    assert gradient(result, inputs).isfinite().all()


def test_bfloat16_velocities_are_cast_to_float32() -> None:
    low = {name: value.detach().bfloat16() if "velocity" in name else value for name, value in batch().items()}
    high = {name: value.float() for name, value in low.items()}
    result = nft_loss(**low, **SETTINGS)
    assert result.loss.dtype == torch.float32
    assert torch.equal(result.rows, nft_loss(**high, **SETTINGS).rows)


def test_nan_propagates() -> None:
    inputs = {name: value.detach().clone() for name, value in batch().items()}
    inputs["velocity"][1, 0, 0] = math.nan
    rows = nft_loss(**inputs, **SETTINGS).rows
    assert rows.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("objective", [NFT(1.0, 5.0, kl_weight=0.0), AWM(1.0, 5.0, 1.0, kl_weight=0.0)])
def test_reference_is_needed_if_kl_weight_is_not_zero(objective: NFT | AWM) -> None:
    assert objective.needs == {"old": 1}
    assert replace(objective, kl_weight=1e-4, reference_every=4).needs == {"old": 1, "reference": 4}


RARE = {"kl_weight": 0.1, "reference_every": 3}


@pytest.mark.parametrize("objective", [NFT(1.0, 5.0, **RARE), AWM(1.0, 5.0, 1.0, **RARE)])
def test_a_rarer_reference_weighs_more_and_its_mean_is_the_term_itself(objective: NFT | AWM) -> None:
    assert objective.forward_passes == pytest.approx(2 + 1 / 3)
    inputs = batch()
    training = SimpleNamespace(**{name: inputs[name] for name in ("x0", "x_t", "sigma", "advantage")})
    velocity, old, reference = (inputs[f"{name}velocity"] for name in ("", "old_", "reference_"))
    always = replace(objective, reference_every=1)(velocity, training, old=old, reference=reference)
    never = objective(velocity, training, old=old)
    now = objective(velocity, training, old=old, reference=reference)
    torch.testing.assert_close((2 * never.per_sample + now.per_sample) / 3, always.per_sample)
    assert "kl" in now.metrics and "kl" not in never.metrics
    assert "kl" in replace(objective, kl_weight=0.0)(velocity, training, old=old).metrics
