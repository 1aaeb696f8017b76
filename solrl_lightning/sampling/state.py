"""The state of a solver on its trajectory: all that is needed to continue from there.

Shapes: B batch.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

NoiseSource = Callable[[int], Tensor]
"""Solver step -> standard normal noise [B, ...] of each candidate for that step."""


class SolverState(NamedTuple):
    """A point of the trajectory and the history that a multistep solver needs."""

    x: Tensor  # [B, ...] float32, the latents at sigmas[step]
    x0: Tensor | None  # [B, ...] float32, the image predicted by the latest velocity evaluation; None before the first
    step: int  # solver steps taken

    def take(self, index: Tensor | tuple[Tensor, ...]) -> "SolverState":
        """Return the candidates ``index`` of the leading dimensions, with their history."""
        return self._map(lambda tensor: tensor[index])

    def flatten(self) -> "SolverState":
        """[P, N, ...] -> [P * N, ...]."""
        return self._map(lambda tensor: tensor.flatten(0, 1))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "SolverState":
        """Apply ``function`` once to a tensor that is both x and x0, as it is after the last step."""
        x = function(self.x)
        x0 = None if self.x0 is None else x if self.x0 is self.x else function(self.x0)
        return SolverState(x, x0, self.step)


def start(x: Tensor) -> SolverState:
    """Return the state before the first step; x [B, ...] is the noise."""
    return SolverState(x.float(), None, 0)
