"""Solvers for rectified flows: whole trajectories (`integrate`) and their single steps (`steps`).

Shapes: B batch, T solver steps. sigma runs from 1 (noise) to 0 (image); x_t = (1 - sigma) x0 + sigma eps;
the velocity is v = eps - x0, so dx/dsigma = v and the image predicted at any point is x0 = x - sigma v.

A trajectory can be stopped after m steps and resumed for some of its candidates:

    for state in steps(velocity, start(noise), sigmas, solver="dpm2", stop_step=4):
        pass
    state = state.take(kept)                                   # takes the solver history of these candidates too
    for state in steps(velocity_of_kept, state, sigmas, solver="dpm2"):
        pass

The result is bit-identical to that without a stop.

A solver is a function that takes one step; a `StochasticSolver` draws noise from its `NoiseSource`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from solrl_lightning.sampling.dpm2 import dpm2_step
from solrl_lightning.sampling.euler import euler_step
from solrl_lightning.sampling.sde import StochasticSolver
from solrl_lightning.sampling.state import NoiseSource, RecordedSteps, SolverState, start

__all__ = [
    "SOLVERS",
    "NoiseSource",
    "RecordedSteps",
    "Solver",
    "SolverState",
    "StochasticSolver",
    "integrate",
    "start",
    "steps",
]

Velocity = Callable[[Tensor, Tensor], Tensor]
"""x [B, ...] in float32 and sigma, a 0-dim float32 tensor on x's device -> v [B, ...]."""
Solver = Callable[[SolverState, Tensor, Sequence[float], NoiseSource | None], SolverState]
"""State at sigmas[i], velocity there, all sigmas, and noise for stochastic solvers -> state at sigmas[i + 1]."""

SOLVERS: dict[str, Solver] = {"euler": euler_step, "dpm2": dpm2_step}


def integrate(velocity: Velocity, x: Tensor, sigmas: Tensor, solver: str = "euler") -> Tensor:
    """Return image latents [B, ...] in float32 from noise x [B, ...], along sigmas [T+1] that descend to 0."""
    return deque(steps(velocity, start(x), sigmas, solver), maxlen=1).pop().x


def steps(
    velocity: Velocity,
    state: SolverState,
    sigmas: Tensor,
    solver: str | Solver = "euler",
    stop_step: int | None = None,
    noise: NoiseSource | None = None,
) -> Iterator[SolverState]:
    """Yield the state after each step from `state.step` up to `stop_step` (default: T).

    Raises:
        ValueError: the solver is unknown, sigmas do not descend from at most 1 to 0, or `stop_step` is out of range.
    """
    if isinstance(solver, str) and solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)}; got {solver!r}")
    take_step = SOLVERS[solver] if isinstance(solver, str) else solver
    levels = _read_schedule(sigmas)
    num_steps = len(levels) - 1
    stop_step = num_steps if stop_step is None else stop_step
    if not state.step <= stop_step <= num_steps:
        raise ValueError(
            "stop_step must lie between the state's step and the number of steps, "
            f"{state.step} to {num_steps}; got {stop_step}"
        )
    sigmas = sigmas.to(state.x.device)
    for i in range(state.step, stop_step):
        state = take_step(state, velocity(state.x, sigmas[i]).float(), levels, noise)
        yield state


def _read_schedule(sigmas: Tensor) -> list[float]:
    """Return the schedule as Python floats, in which solvers compute their coefficients in double precision."""
    levels: list[float] = sigmas.tolist()
    descends = all(later < earlier for earlier, later in zip(levels, levels[1:], strict=False))
    if len(levels) < 2 or not descends or levels[0] > 1 or levels[-1] != 0:
        raise ValueError(f"sigmas must descend strictly from at most 1 to exactly 0 in T+1 >= 2 values; got {levels}")
    return levels
