"""The Euler solver: first order, one velocity evaluation per step."""

from collections.abc import Sequence

from torch import Tensor

from solrl_lightning.sampling.state import NoiseSource, SolverState


def euler_step(
    state: SolverState, velocity: Tensor, sigmas: Sequence[float], noise: NoiseSource | None = None
) -> SolverState:
    """Return the state at sigmas[i + 1], i = state.step, from velocity [B, ...] at (x, sigmas[i])."""
    sigma, sigma_next = sigmas[state.step], sigmas[state.step + 1]
    x0 = state.x - sigma * velocity
    finished = sigma_next == 0
    x = x0 if finished else state.x + (sigma_next - sigma) * velocity
    return SolverState(x, x0, state.step + 1, finished=finished)
