"""State of a solver between two steps."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

T = TypeVar("T")

NoiseSource = Callable[[int], Tensor | None]
"""Solver step -> standard normal noise [B, ...] of that step, or None if the step is deterministic."""


class SolverState(NamedTuple):
    """A point of the trajectory with the history that a multistep solver needs to continue."""

    x: Tensor  # [B, ...] float32, the latents at sigmas[step]
    x0: Tensor | None  # [B, ...] float32, predicted by the latest velocity evaluation; None before the first one
    step: int  # solver steps taken
    log_prob: Tensor | None = None  # [B] float32, of x given the previous x; None after a deterministic step
    finished: bool = False  # x is the image, the tensor x0 itself

    def take(self, index: Tensor) -> "SolverState":
        """Return the state of the trajectories ``index``."""
        return map_tensors(lambda tensor: tensor[index], self)


def start(x: Tensor) -> SolverState:
    """Return the state before the first step; x [B, ...] is the noise."""
    return SolverState(x.float(), None, 0)


class RecordedSteps(NamedTuple):
    """Recorded consecutive steps of a trajectory."""

    first: int  # solver step that leads from x[:, 0] to x[:, 1]
    x: Tensor  # [B, S + 1, ...] float32
    log_probs: Tensor | None  # [B, S] float32, of each step's x given the one before; None with a deterministic solver


def map_tensors(function: Callable[[Tensor], Tensor], tree: T) -> T:
    """Return ``tree``, nested named tuples, with ``function`` applied once to each tensor: x may be x0."""
    return tree_map_only(Tensor, cache(function), tree)


def concatenate(trees: Sequence[T]) -> T:
    """Return ``trees`` of one form with their tensors concatenated; what is no tensor is from the first one."""
    return tree_map(lambda first, *others: torch.cat([first, *others]) if isinstance(first, Tensor) else first, *trees)
