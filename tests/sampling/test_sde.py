"""Stochastic transitions against independent float64 formulas, their limits, and the marginals of an exact flow."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from solrl_lightning.sampling import StochasticSolver, start, steps
from solrl_lightning.sampling.sde import dance_grpo_transition, flow_grpo_transition, log_prob

X, V = (torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2))
SIGMA = torch.tensor([0.95, 0.8, 0.5, 0.3, 0.1], dtype=torch.float64)
NEXT = SIGMA - 0.07


def flow(
    x: Tensor, v: Tensor, sigma: Tensor | float, after: Tensor | float, level: float = 0.7
) -> tuple[Tensor, Tensor]:
    return flow_grpo_transition(x, v, sigma, after, noise_level=level, sigma_at_one=0.9)


def dance(
    x: Tensor, v: Tensor, sigma: Tensor | float, after: Tensor | float, eta: float = 0.3
) -> tuple[Tensor, Tensor]:
    return dance_grpo_transition(x, v, sigma, after, eta=eta)


def reverse_sde(x: Tensor, v: Tensor, sigma: Tensor, after: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Euler-Maruyama step of dx = (v - s^2/2 score) dsigma + s dw, with score = -eps / sigma."""
    column = (slice(None), None, None, None)
    eps = x + (1 - sigma)[column] * v
    drift = v + (s**2 / 2)[column] * eps / sigma[column]
    return x + drift * (after - sigma)[column], s * (sigma - after).sqrt()


@pytest.mark.parametrize(
    ("transition", "s"), [(flow, 0.7 * (SIGMA / (1 - SIGMA)).sqrt()), (dance, torch.full_like(SIGMA, 0.3))]
)
def test_transition_is_a_step_of_the_reverse_sde(transition: Callable[..., tuple[Tensor, Tensor]], s: Tensor) -> None:
    mean, std = transition(X, V, SIGMA, NEXT)
    expected_mean, expected_std = reverse_sde(X, V, SIGMA, NEXT, s)
    assert mean.dtype == std.dtype == torch.float64
    torch.testing.assert_close(mean, expected_mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(std, expected_std, rtol=0, atol=1e-12)
    for row in range(len(SIGMA)):
        one, one_std = transition(X[row : row + 1], V[row : row + 1], float(SIGMA[row]), float(NEXT[row]))
        torch.testing.assert_close(one[0], mean[row], rtol=0, atol=1e-12)
        torch.testing.assert_close(one_std, std[row], rtol=0, atol=1e-12)


@pytest.mark.parametrize("transition", [flow, dance])
def test_transition_without_noise_is_the_euler_step(transition: Callable[..., tuple[Tensor, Tensor]]) -> None:
    mean, std = transition(X, V, 0.5, 0.4, 0.0)
    assert float(std) == 0
    torch.testing.assert_close(mean, X - 0.1 * V, rtol=0, atol=1e-14)


def test_flow_grpo_replaces_sigma_one_in_the_noise_scale_only() -> None:
    mean, std = flow(X, V, 1.0, 0.9)
    s = 0.7 * math.sqrt(1.0 / (1 - 0.9))
    assert float(std) == pytest.approx(s * math.sqrt(0.1), rel=1e-12)
    torch.testing.assert_close(mean, X * (1 - s**2 / 2 * 0.1) - 0.1 * V, rtol=0, atol=1e-12)


def test_log_prob_is_the_mean_gaussian_log_density() -> None:
    std = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    expected = Normal(V, std[:, None, None, None].expand_as(V)).log_prob(X).flatten(1).mean(1)
    torch.testing.assert_close(log_prob(X, V, std), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(log_prob(X, V, std[2])[2], expected[2], rtol=1e-12, atol=0)


@pytest.mark.parametrize("transition", [flow, dance])
def test_expected_log_prob_of_own_samples(transition: Callable[..., tuple[Tensor, Tensor]]) -> None:
    def at(x: Tensor, v: Tensor, sigma: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        return transition(x, v, sigma, after)

    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(4, 100_000, generator=generator)
    levels = torch.tensor([0.6, 0.5, 0.0])
    (first, _) = steps(
        lambda x, _: x, start(torch.zeros(4, 100_000)), levels, StochasticSolver(at), None, {0: noise}.get
    )
    std = transition(first.x, first.x, 0.6, 0.5)[1]
    assert first.log_prob is not None
    expected = -std.log() - 0.5 * math.log(2 * math.pi) - 0.5
    torch.testing.assert_close(first.log_prob, expected.expand(4), rtol=0, atol=0.01)  # standard error 0.0022


def test_only_steps_with_noise_are_stochastic() -> None:
    def at(x: Tensor, v: Tensor, sigma: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        return dance(x, v, sigma, after)

    levels = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    noise = {1: torch.ones(2, 3)}
    state = start(torch.zeros(2, 3))
    states = list(steps(lambda x, sigma: x + 1, state, levels, StochasticSolver(at), None, noise.get))
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


@pytest.mark.parametrize("level", [lambda x, v, s, t: flow(x, v, s, t, 0.7), lambda x, v, s, t: dance(x, v, s, t, 0.8)])
def test_marginals_equal_those_of_the_ode_on_the_exact_gaussian_flow(
    level: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    generator = torch.Generator().manual_seed(3)
    count, last = 20_000, 200
    x = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    levels = torch.linspace(0.995, 0, last + 1, dtype=torch.float64)
    state = start(x)._replace(x=x)

    def noise(step: int) -> Tensor | None:
        return torch.randn(count, 1, generator=generator, dtype=torch.float64) if step < last - 1 else None

    for state in steps(exact_velocity, state, levels, StochasticSolver(level), None, noise):  # noqa: B020
        if state.step in (50, 100, 150, last):
            sigma = float(levels[state.step])
            std = math.sqrt(((1 - sigma) * SPREAD) ** 2 + sigma**2)
            assert float(state.x.mean()) == pytest.approx((1 - sigma) * MEAN, abs=0.03)
            assert float(state.x.std()) == pytest.approx(std, rel=0.04)
