"""Stochastic transitions against independent float64 formulas, their limits, and the marginals of an exact flow."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from solrl_lightning.sampling import StochasticSolver, start, steps
from solrl_lightning.sampling.sde import dance_grpo_transition, flow_grpo_transition, log_prob

X, V = (torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2))
SIGMA = torch.tensor([0.95, 0.8, 0.5, 0.3, 0.1], dtype=torch.float64)
NEXT = SIGMA - 0.07

Transition = Callable[..., tuple[Tensor, Tensor]]
flow = partial(flow_grpo_transition, sigma_at_one=0.9)
dance = dance_grpo_transition


def reverse_sde(x: Tensor, v: Tensor, sigma: Tensor, after: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Euler-Maruyama step of dx = (v - s^2/2 score) dsigma + s dw, with score = -eps / sigma."""
    column = (slice(None), None, None, None)
    eps = x + (1 - sigma)[column] * v
    drift = v + (s**2 / 2)[column] * eps / sigma[column]
    return x + drift * (after - sigma)[column], s * (sigma - after).sqrt()


@pytest.mark.parametrize(
    ("transition", "s"),
    [
        (partial(flow, noise_level=0.7), 0.7 * (SIGMA / (1 - SIGMA)).sqrt()),
        (partial(dance, eta=0.3), torch.full_like(SIGMA, 0.3)),
    ],
)
def test_transition_is_a_step_of_the_reverse_sde(transition: Transition, s: Tensor) -> None:
    moments = transition(X, V, SIGMA, NEXT)
    assert {value.dtype for value in moments} == {torch.float64}
    torch.testing.assert_close(moments, reverse_sde(X, V, SIGMA, NEXT, s), rtol=0, atol=1e-12)
    for row in range(len(SIGMA)):
        mean, std = transition(X[row : row + 1], V[row : row + 1], float(SIGMA[row]), float(NEXT[row]))
        torch.testing.assert_close((mean[0], std), (moments[0][row], moments[1][row]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("transition", [partial(flow, noise_level=0.0), partial(dance, eta=0.0)])
def test_transition_without_noise_is_the_euler_step(transition: Transition) -> None:
    mean, std = transition(X, V, 0.5, 0.4)
    assert float(std) == 0
    torch.testing.assert_close(mean, X - 0.1 * V, rtol=0, atol=1e-14)


def test_flow_grpo_replaces_sigma_one_in_the_noise_scale_only() -> None:
    mean, std = flow(X, V, 1.0, 0.9, noise_level=0.7)
    s = 0.7 * math.sqrt(1.0 / (1 - 0.9))
    assert float(std) == pytest.approx(s * math.sqrt(0.1), rel=1e-12)
    torch.testing.assert_close(mean, X * (1 - s**2 / 2 * 0.1) - 0.1 * V, rtol=0, atol=1e-12)


def test_log_prob_is_the_mean_gaussian_log_density() -> None:
    std = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    expected = Normal(V, std[:, None, None, None].expand_as(V)).log_prob(X).flatten(1).mean(1)
    torch.testing.assert_close(log_prob(X, V, std), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(log_prob(X, V, std[2])[2], expected[2], rtol=1e-12, atol=0)


@pytest.mark.parametrize("transition", [partial(flow, noise_level=0.7), partial(dance, eta=0.3)])
def test_expected_log_prob_of_samples(transition: Transition) -> None:
    x = torch.zeros(4, 100_000)
    noise = {0: torch.randn(x.shape, generator=torch.Generator().manual_seed(2))}
    (first, _) = steps(
        lambda x, _: x, start(x), torch.tensor([0.6, 0.5, 0.0]), StochasticSolver(transition), None, noise.get
    )
    assert first.log_prob is not None
    expected = -transition(x, x, 0.6, 0.5)[1].log() - 0.5 * math.log(2 * math.pi) - 0.5
    torch.testing.assert_close(first.log_prob, expected.expand(4), rtol=0, atol=0.01)  # standard error 0.0022


def test_only_steps_with_noise_are_stochastic() -> None:
    levels, state, noise = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]), start(torch.zeros(2, 3)), {1: torch.ones(2, 3)}
    solver = StochasticSolver(partial(dance, eta=0.3))
    states = list(steps(lambda x, sigma: x + 1, state, levels, solver, None, noise.get))
    plain = list(steps(lambda x, sigma: x + 1, state, levels, "euler"))
    assert [later.log_prob is not None for later in states] == [False, True, False, False]
    assert torch.equal(states[0].x, plain[0].x) and not torch.equal(states[1].x, plain[1].x)
    assert states[-1].x is states[-1].x0


MEAN, SPREAD = 1.5, 0.4  # of the data of the exact flow


def exact_velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """Return E[eps - x0 | x] for data N(MEAN, SPREAD^2)."""
    variance = ((1 - sigma) * SPREAD) ** 2 + sigma**2
    residual = (x - (1 - sigma) * MEAN) / variance
    return sigma * residual - (MEAN + (1 - sigma) * SPREAD**2 * residual)


@pytest.mark.parametrize("transition", [partial(flow, noise_level=0.7), partial(dance, eta=0.8)])
def test_marginals_equal_those_of_the_ode_on_the_exact_gaussian_flow(transition: Transition) -> None:
    generator = torch.Generator().manual_seed(3)
    count, last = 20_000, 200
    levels = torch.linspace(0.995, 0, last + 1, dtype=torch.float64)

    def noise(step: int) -> Tensor | None:
        return torch.randn(count, 1, generator=generator, dtype=torch.float64) if step < last - 1 else None

    x = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    initial = start(x)._replace(x=x)  # in float64
    for state in steps(exact_velocity, initial, levels, StochasticSolver(transition), None, noise):
        if state.step in (50, 100, 150, last):
            sigma = float(levels[state.step])
            std = math.sqrt(((1 - sigma) * SPREAD) ** 2 + sigma**2)
            assert float(state.x.mean()) == pytest.approx((1 - sigma) * MEAN, abs=0.03)
            assert float(state.x.std()) == pytest.approx(std, rel=0.04)
