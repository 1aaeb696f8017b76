"""The stages of a family: passes over the candidates, each with its sampler, steps and solver."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from solrl_lightning.sampling import Solver

EXPLORE, REGENERATE = "explore", "regenerate"

Sigmas = Callable[[int], Tensor]
"""Solver steps T -> the noise levels [T + 1] of a policy."""
_ROUNDING = 1e-6  # of noise levels in float32


class Stage(NamedTuple):
    """One pass over the candidates."""

    name: str  # a non-finite image scores NaN in EXPLORE and is an error in REGENERATE
    sampler: str  # see `Transformers.samplers`
    steps: int
    solver: str | Solver
    stop_step: int | None = None  # stop here and score the predicted image
    decoder: str = "full"  # or "bf16" or "preview"
    keep: int | None = None  # best and worst by reward, passed to the next stage or to training; None keeps all

    def continues_in(self, following: "Stage") -> bool:
        """Return whether ``following`` resumes these trajectories; if not, it starts from the seeds' noise."""
        same = (self.sampler, self.steps, self.solver) == (following.sampler, following.steps, following.solver)
        return self.stop_step is not None and same


def with_next(stages: Sequence[Stage]) -> Iterator[tuple[Stage, Stage | None]]:
    """Yield each stage and the one that follows it, which the last one lacks."""
    yield from zip(stages, [*stages[1:], None], strict=True)


def step_at(level: float, sigmas: Tensor) -> int:
    """Return the number of steps after which the image is predicted from at most the noise level ``level``, below 1.

    Step m predicts it from sigmas[m - 1] and moves to sigmas[m] of sigmas [T + 1]; T + 1 if no step does.
    """
    return 1 + int((sigmas[:-1].double() > level + _ROUNDING).sum())


def level_of(step: int, sigmas: Tensor) -> str:
    """Return the number with the fewest decimals, at least two, that is the level of ``step`` for ``step_at``."""
    sigma = float(sigmas[step - 1])
    levels = (f"{math.ceil(sigma * 10**n - 1e-4) / 10**n:.{n}f}" for n in range(2, 8))
    return next(level for level in levels if step_at(float(level), sigmas) == step)


def evaluations(stages: Sequence[Stage], pool: int) -> list[int]:
    """Return the model evaluations of each stage for one prompt: forward passes of the transformer for one image."""
    counts, done = [], 0
    for (stage, following), images in zip(with_next(stages), candidates_per_prompt(stages, pool), strict=True):
        end = stage.steps if stage.stop_step is None else stage.stop_step
        counts.append(images * (end - done))
        done = end if following is not None and stage.continues_in(following) else 0
    return counts


def steps_label(stages: Sequence[Stage]) -> str:
    """Return the steps of exploration as text: ``6 steps``, ``4 of 10 steps`` or, with rungs, ``3/5 of 10 steps``."""
    steps, stops = stages[0].steps, [stage.stop_step or stage.steps for stage in stages]
    return f"{steps} steps" if stops == [steps] else f"{'/'.join(map(str, stops))} of {steps} steps"


def candidates_per_prompt(stages: Sequence[Stage], pool: int) -> list[int]:
    """Return the number of candidates per prompt of each stage."""
    counts = [pool]
    for stage in stages[:-1]:
        counts.append(counts[-1] if stage.keep is None else stage.keep)
    return counts
