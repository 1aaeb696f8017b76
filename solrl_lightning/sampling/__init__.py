"""Deterministic ODE solvers for rectified flows, whole (`integrate`) or stopped and resumed (`start`, `advance`).

Shapes: B batch, T solver steps. sigma runs from 1 (noise) to 0 (image); x_t = (1 - sigma) x0 + sigma eps;
the velocity is v = eps - x0, so dx/dsigma = v and the image predicted at any point is x0 = x - sigma v.

A family that explores on a prefix of the trajectory stops after m steps, scores `state.x0`, and goes on with the kept
candidates only:

    state = advance(velocity, start(noise), sigmas, solver="dpm2", until=4)
    state = state.take(kept)                                   # solver history is kept for exactly these rows
    images = advance(velocity_of_kept, state, sigmas, solver="dpm2").x

Left out: stochastic (SDE) transitions, which the published method has in its code but does not use; third-order and
adaptive solvers.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from solrl_lightning.sampling.dpm2 import dpm2_step
from solrl_lightning.sampling.euler import euler_step
from solrl_lightning.sampling.state import SolverState, start

__all__ = [
    "SOLVERS",
    "SolverState",
    "advance",
    "dpm2_step",
    "euler_step",
    "integrate",
    "start",
]

Velocity = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[SolverState, Tensor, Sequence[float]], SolverState]

SOLVERS: dict[str, Step] = {"euler": euler_step, "dpm2": dpm2_step}


def integrate(velocity: Velocity, x: Tensor, sigmas: Tensor, solver: str = "euler") -> Tensor:
    """Noise [B, ...] -> image latents [B, ...] in float32, along sigmas [T+1] that descend to 0.

    `velocity(x, sigma)` gets x [B, ...] in float32 and sigma as a 0-dim float32 tensor on x's device.
    """
    return advance(velocity, start(x), sigmas, solver).x


def advance(
    velocity: Velocity, state: SolverState, sigmas: Tensor, solver: str = "euler", until: int | None = None
) -> SolverState:
    """Take the steps from `state.step` up to `until` (default: all T). Stopping and resuming changes no bit."""
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)}; got {solver!r}")
    step = SOLVERS[solver]
    levels = _checked(sigmas)
    num_steps = len(levels) - 1
    until = num_steps if until is None else until
    if not state.step <= until <= num_steps:
        raise ValueError(
            f"until must lie between the state's step and the number of steps, {state.step} to {num_steps}; got {until}"
        )
    sigmas = sigmas.to(state.x.device)
    for i in range(state.step, until):
        state = step(state, velocity(state.x, sigmas[i]).float(), levels)
    return state


def _checked(sigmas: Tensor) -> list[float]:
    """The schedule as Python floats: solver coefficients are computed in double precision."""
    levels: list[float] = sigmas.tolist()
    descends = all(later < earlier for earlier, later in zip(levels, levels[1:], strict=False))
    if len(levels) < 2 or not descends or levels[0] > 1 or levels[-1] != 0:
        raise ValueError(f"sigmas must descend strictly from at most 1 to exactly 0 in T+1 >= 2 values; got {levels}")
    return levels
