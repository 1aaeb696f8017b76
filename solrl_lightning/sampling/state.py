"""State of a solver between two steps.

Shapes: B batch.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

NoiseSource = Callable[[int], Tensor]
"""Solver step -> standard normal noise [B, ...] of that step."""


class SolverState(NamedTuple):
    """A point of the trajectory with the history that a multistep solver needs to continue."""

    x: Tensor  # [B, ...] float32, the latents at sigmas[step]
    x0: Tensor | None  # [B, ...] float32, predicted by the latest velocity evaluation; None before the first one
    step: int  # solver steps taken

    def take(self, index: Tensor | tuple[Tensor, ...]) -> "SolverState":
        """Return the state indexed by ``index`` in the leading dimensions."""
        return self._map(lambda tensor: tensor[index])

    def flatten(self) -> "SolverState":
        """Return the state [P, N, ...] as [P * N, ...]."""
        return self._map(lambda tensor: tensor.flatten(0, 1))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "SolverState":
        """Apply ``function`` to x and x0, but once if both are one tensor, as they are after the last step."""
        x = function(self.x)
        x0 = None if self.x0 is None else x if self.x0 is self.x else function(self.x0)
        return SolverState(x, x0, self.step)


def start(x: Tensor) -> SolverState:
    """Return the state before the first step; x [B, ...] is the noise."""
    return SolverState(x.float(), None, 0)
