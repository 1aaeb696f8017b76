"""Stochastic steps of rectified flows: Gaussian transitions with the marginals of the ODE, and log-probabilities.

The reverse SDE of a flow with noise scale s adds s^2/2 times the score to the drift. In terms of the velocity, the
score at (x, sigma) is -(x + (1 - sigma) v) / sigma. Both transitions are its Euler-Maruyama step and differ in s only:

| objective | s | source |
|---|---|---|
| flow_grpo | noise_level sqrt(sigma / (1 - sigma)) | Flow-GRPO (arXiv 2505.05470), Eq. 9 |
| dance_grpo | eta | DanceGRPO (arXiv 2505.07818), Eq. 8 |

The means are written as in the published codes.

Shapes: B batch. sigma and sigma_next are [B] or scalars; results have the dtype of x.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from solrl_lightning.sampling.euler import euler_step
from solrl_lightning.sampling.state import NoiseSource, SolverState

Transition = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""x, velocity [B, ...], sigma, sigma_next -> mean [B, ...] and standard deviation, [B] or scalar, of the next x."""


def flow_grpo_transition(
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    *,
    noise_level: float,
    sigma_at_one: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Return the mean [B, ...] and the standard deviation of the next x, over the whole step.

    ``sigma_at_one`` replaces sigma = 1 in s, which is infinite there; published: the schedule's second value.
    """
    sigma, sigma_next, sigma_at_one = (_like(x, value) for value in (sigma, sigma_next, sigma_at_one))
    s = noise_level * (sigma / (1 - torch.where(sigma == 1, sigma_at_one, sigma))).sqrt()
    dt, pull = sigma_next - sigma, s.square() / (2 * sigma)
    mean = x * _rows(1 + pull * dt, x) + velocity * _rows((1 + pull * (1 - sigma)) * dt, x)
    return mean, s * (-dt).sqrt()


def dance_grpo_transition(
    x: Tensor, velocity: Tensor, sigma: Tensor | float, sigma_next: Tensor | float, *, eta: float
) -> tuple[Tensor, Tensor]:
    """Return the mean [B, ...] and the standard deviation of the next x."""
    sigma, sigma_next = _like(x, sigma), _like(x, sigma_next)
    dt = sigma_next - sigma
    x0 = x - _rows(sigma, x) * velocity
    score = -(x - _rows(1 - sigma, x) * x0) / _rows(sigma.square(), x)
    mean = x + _rows(dt, x) * (velocity - 0.5 * eta**2 * score)
    return mean, eta * (-dt).sqrt()


def log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return [B]: the log-density of x_next [B, ...] under N(mean, std^2), as a mean over its elements."""
    std = _like(mean, std)
    squares = (x_next - mean).square().flatten(1).mean(1)
    return -squares / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class StochasticSolver:
    """Takes ``transition`` where the noise source has noise for the step, and an Euler step elsewhere."""

    transition: Transition

    def __call__(
        self, state: SolverState, velocity: Tensor, sigmas: Sequence[float], noise: NoiseSource | None = None
    ) -> SolverState:
        """Return the state at sigmas[i + 1], i = state.step, with the log-probability of its x."""
        after = euler_step(state, velocity, sigmas)
        drawn = None if noise is None else noise(state.step)
        if drawn is None:
            return after
        sigma, sigma_next = (_like(state.x, sigmas[i]).expand(len(state.x)) for i in (state.step, after.step))
        mean, std = self.transition(state.x, velocity, sigma, sigma_next)
        x = mean + _rows(std, mean) * drawn
        return after._replace(x=x, log_prob=log_prob(x, mean, std), finished=False)


def _like(x: Tensor, value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=x.dtype, device=x.device)


def _rows(value: Tensor, x: Tensor) -> Tensor:
    """Return ``value``, [B] or scalar, so that it multiplies the rows of x [B, ...]."""
    return value.view(-1, *[1] * (x.ndim - 1)) if value.ndim else value
