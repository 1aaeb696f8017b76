"""State of a solver between two steps.

Shapes: B batch.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

NoiseSource = Callable[[int], Tensor | None]
"""Solver step -> standard normal noise [B, ...] of that step, or None if the step is deterministic."""


class SolverState(NamedTuple):
    """A point of the trajectory with the history that a multistep solver needs to continue."""

    x: Tensor  # [B, ...] float32, the latents at sigmas[step]
    x0: Tensor | None  # [B, ...] float32, predicted by the latest velocity evaluation; None before the first one
    step: int  # solver steps taken
    log_prob: Tensor | None = None  # [B] float32, of x given the previous x; None after a deterministic step

    def take(self, index: Tensor) -> "SolverState":
        """Return the state of the trajectories ``index``."""
        return self.map(lambda tensor: tensor[index])

    def flatten(self) -> "SolverState":
        """Return the state [P, N, ...] as [P * N, ...]."""
        return self.map(lambda tensor: tensor.flatten(0, 1))

    def map(self, function: Callable[[Tensor], Tensor]) -> "SolverState":
        """Apply ``function`` to x and x0, but once if both are one tensor, as after the last step; drop `log_prob`."""
        x = function(self.x)
        x0 = None if self.x0 is None else x if self.x0 is self.x else function(self.x0)
        return SolverState(x, x0, self.step)


def start(x: Tensor) -> SolverState:
    """Return the state before the first step; x [B, ...] is the noise."""
    return SolverState(x.float(), None, 0)


class Path(NamedTuple):
    """Recorded consecutive steps of a trajectory."""

    first: int  # solver step that leads from x[:, 0] to x[:, 1]
    x: Tensor  # [B, S + 1, ...] float32
    log_probs: Tensor | None  # [B, S] float32, of each step's x given the one before; None with a deterministic solver

    def take(self, index: Tensor) -> "Path":
        """Return the path of the trajectories ``index``."""
        return self.map(lambda tensor: tensor[index.to(tensor.device)])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Path":
        """Return the path with ``function`` applied to its tensors."""
        return Path(self.first, function(self.x), None if self.log_probs is None else function(self.log_probs))
