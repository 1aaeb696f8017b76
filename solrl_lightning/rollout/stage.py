"""The stages of a family: passes over the candidates. Imports no torch, as options are checked without it."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import InstanceOf

from solrl_lightning.names import Decoder, Sampler, SolverName
from solrl_lightning.options.rules import Count, Group, Level
from solrl_lightning.options.rules import Steps as StepCount

if TYPE_CHECKING:
    from torch import Tensor

EXPLORE, REGENERATE = "explore", "regenerate"

Sigmas = Callable[[int], "Tensor"]
"""Solver steps T -> the noise levels [T + 1] of a model."""
_ROUNDING = 1e-6  # of noise levels in float32


class Stage(Group):
    """One pass over the candidates; an option of sampling is a field. The last five are no keys: the code sets them."""

    no_keys: ClassVar[tuple[str, ...]] = ("name", "keep", "with_states", "shared_noise", "transitions")
    sampler: Sampler
    """How the old policy samples: shadow (its quantised copy), merged (BF16 with its LoRA merged into the weights), or
    policy (BF16 with LoRA branches, as in training; slower)."""
    steps: StepCount
    """Solver steps of the whole trajectory."""
    solver: SolverName | None = None
    """Null: ``model.solver``, or in the last stage the stochastic one of an objective that has its own."""
    stop_after: Count | None = None
    """Steps after which the predicted image is scored; the last one if null."""
    stop_below: Level | None = None
    """Instead of ``stop_after``: the highest noise level from which the image to score is predicted."""
    decoder: Decoder = "full"
    """Decoder of the images to score: full, bf16 (full in bfloat16), or preview (model.preview_decoder)."""
    name: str = REGENERATE
    """A NaN image scores NaN in EXPLORE and is an error in REGENERATE."""
    keep: int | None = None
    """The best and the worst by merit, passed to the next stage or to training; None: all."""
    with_states: bool = True
    """Whether the states are read, by a stage that resumes them or by training; if not, they are scored and freed."""
    shared_noise: bool = False
    """Start all candidates of a prompt from the noise of its first seed."""
    transitions: InstanceOf[range] = range(0)
    """Steps that are recorded, and to which a stochastic solver adds noise: see `Objective.transitions`."""

    def but(self, **changes: Any) -> "Stage":
        """Return a stage with other values, which are not checked."""
        return Stage.model_construct(**{name: getattr(self, name) for name in Stage.model_fields} | changes)

    @property
    def end(self) -> int:
        """The step after which the candidates are scored."""
        return self.stop_after or self.steps

    @property
    def trajectory(self) -> dict[str, Any]:
        """The options that change a trajectory: two stages with equal ones pass through the same states."""
        return {"sampler": self.sampler, "steps": self.steps, "solver": self.solver}

    def continues_in(self, following: "Stage") -> bool:
        """Return whether ``following`` resumes these trajectories; if not, it starts from the seeds' noise."""
        return self.stop_after is not None and self.trajectory == following.trajectory


def with_next(stages: Sequence[Stage]) -> Iterator[tuple[Stage, Stage | None]]:
    """Yield each stage and the one that follows it, which the last one lacks."""
    yield from zip(stages, [*stages[1:], None], strict=True)


def step_at(level: float, sigmas: "Tensor") -> int:
    """Return the number of steps after which the image is predicted from at most the noise level ``level``, below 1.

    Step m predicts it from sigmas[m - 1] and moves to sigmas[m] of sigmas [T + 1]; T + 1 if no step does.
    """
    return 1 + int((sigmas[:-1].double() > level + _ROUNDING).sum())


def level_of(step: int, sigmas: "Tensor") -> str:
    """Return the number with the fewest decimals, at least two, that is the level of ``step`` for ``step_at``."""
    sigma = float(sigmas[step - 1])
    levels = (f"{math.ceil(sigma * 10**n - 1e-4) / 10**n:.{n}f}" for n in range(2, 8))
    return next(level for level in levels if step_at(float(level), sigmas) == step)


def velocities_per_prompt(stages: Sequence[Stage], pool: int) -> list[int]:
    """Return the velocities that each stage computes for one prompt, each for one image at one noise level."""
    counts, done = [], 0
    for (stage, following), images in zip(with_next(stages), candidates_per_prompt(stages, pool), strict=True):
        counts.append(images * (stage.end - done))
        done = stage.end if following is not None and stage.continues_in(following) else 0
    return counts


def steps_label(stages: Sequence[Stage]) -> str:
    """Return the steps of exploration as text: ``6 steps``, ``4 of 10 steps`` or, with rungs, ``3/5 of 10 steps``."""
    steps, stops = stages[0].steps, [stage.end for stage in stages]
    return f"{steps} steps" if stops == [steps] else f"{'/'.join(map(str, stops))} of {steps} steps"


def candidates_per_prompt(stages: Sequence[Stage], pool: int) -> list[int]:
    """Return the number of candidates per prompt of each stage."""
    counts = [pool]
    for stage in stages[:-1]:
        counts.append(counts[-1] if stage.keep is None else stage.keep)
    return counts
