"""The Euler solver. First order; one velocity evaluation a step."""

from collections.abc import Sequence

from torch import Tensor

from solrl_lightning.sampling.state import NoiseSource, SolverState


def euler_step(
    state: SolverState, velocity: Tensor, sigmas: Sequence[float], noise: NoiseSource | None = None
) -> SolverState:
    """One step from sigmas[i] to sigmas[i+1], i = state.step, with velocity [B, ...] evaluated at (x, sigmas[i])."""
    sigma, sigma_next = sigmas[state.step], sigmas[state.step + 1]
    x0 = state.x - sigma * velocity
    x = x0 if sigma_next == 0 else state.x + (sigma_next - sigma) * velocity  # the last step lands on x0 to the bit
    return SolverState(x, x0, state.step + 1)
