"""Where a solver stands on its trajectory; everything that is needed to go on from there.

Shapes: B batch.
"""

from typing import NamedTuple

from torch import Tensor


class SolverState(NamedTuple):
    """A point of the trajectory and the history that a multistep solver needs."""

    x: Tensor  # [B, ...] float32, the latents at sigmas[step]
    x0: Tensor | None  # [B, ...] float32, the image predicted by the latest velocity evaluation; None before the first
    step: int  # solver steps taken

    def take(self, rows: Tensor) -> "SolverState":
        """The candidates `rows` (int64 indices or a bool mask over B) with their history."""
        return SolverState(self.x[rows], None if self.x0 is None else self.x0[rows], self.step)

    def flatten(self) -> "SolverState":
        """[P, N, ...] -> [P * N, ...]."""
        return SolverState(self.x.flatten(0, 1), None if self.x0 is None else self.x0.flatten(0, 1), self.step)


def start(x: Tensor) -> SolverState:
    """The state at the head of the trajectory: x [B, ...] is the noise."""
    return SolverState(x.float(), None, 0)
