"""The search of task=audit: where exploration in BF16 may stop, simulated on one trajectory of the pool.

The images predicted at its steps are scored once. ``family=prefix`` with every step and ``family=race`` with pairs of
steps select from these scores as they would in a run.

Shapes: P prompts, N pool, K candidates of a stage, R rewards.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.metrics.selection_gain import gap_of_prompts, ratio_of_sums
from solrl_lightning.options.family import Exploration, Rung
from solrl_lightning.rollout.explore import RunStage, run_family
from solrl_lightning.rollout.records import Candidates, EncodedPrompts
from solrl_lightning.rollout.select import take
from solrl_lightning.rollout.stage import Sigmas, Stage, level_of, steps_label, velocities_per_prompt

_EIGHTHS = (3, 4, 5, 6)  # of the pool, that the first of two rungs keeps


def score_steps(stage: Stage, prompts: EncodedPrompts, seeds: Tensor, run: RunStage) -> dict[int, Tensor]:
    """Return the scores [P, N, R] on the CPU by step, from the second step of ``stage`` to the last but one.

    The first step predicts from pure noise, whose level no early stop has.
    """
    scores, state = {}, None
    for step in range(2, stage.steps):
        candidates = run(stage.but(stop_after=step), prompts, seeds, state)
        scores[step], state = candidates.scores.cpu(), candidates.state
    return scores


def simulate(stages: Sequence[Stage], scores: Mapping[int, Tensor], merits: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the merits [P, N] of the pool that ``stages`` explore, from the ``scores`` of their steps.

    ``merits``: of scores [P, K, R], as the rewards compute them.
    """

    def look_up(stage: Stage, _: Any, places: Tensor, state: Any) -> Candidates:
        scored = take(scores[stage.end], places)
        return Candidates(places, None, merits(scored), scored, merits(scored))

    count, pool, _ = scores[min(scores)].shape
    prompts = EncodedPrompts([Prompt("")] * count, {})
    return run_family(stages, prompts, torch.arange(pool).expand(count, pool), look_up).pool.merits


class EarlyStop(NamedTuple):
    """A way to explore in BF16, and what it keeps."""

    explorer: Exploration
    name: str  # steps and noise levels
    keep: list[int | None]  # candidates that continue after each stop
    velocities: int  # of a prompt, with those that regenerate
    gap_kept: float  # share of the reward gap
    gap_error: float  # its standard error over prompts, NaN for a single one

    @property
    def family(self) -> str:
        return "race" if self.explorer.rungs else "prefix"

    def enough(self, min_gap: float) -> bool:
        error = 0.0 if math.isnan(self.gap_error) else self.gap_error
        return self.gap_kept + error >= min_gap


def early_stops(explorer: Exploration, sigmas: Tensor, pool: int, keep: int) -> Iterator[Exploration]:
    """Yield ways to explore: a stop at each noise level, and two rungs at each pair of levels."""
    levels = [float(level_of(step, sigmas)) for step in range(2, explorer.steps)]
    kept = [number for number in (pool * eighths // 8 for eighths in _EIGHTHS) if keep < number < pool]
    whole = explorer.model_copy(update={"stop_after": None})
    for level in levels:
        yield whole.model_copy(update={"stop_below": level})
    for (first, second), number in product(combinations(levels, 2), kept):
        yield whole.model_copy(update={"rungs": [Rung(below=first, keep=number), Rung(below=second, keep=keep)]})


def search(
    explorer: Exploration,
    scores: Mapping[int, Tensor],
    merits: Callable[[Tensor], Tensor],
    truth: Tensor,
    sigmas: Sigmas,
    keep: int,
) -> list[EarlyStop]:
    """Simulate the early stops of ``explorer``; the cheapest is first. ``truth``: merits [P, N]."""
    assert explorer.solver is not None, "the families name it"
    pool, gaps, stops = truth.shape[1], gap_of_prompts(truth, truth, keep), []
    regenerate = explorer.but(stop_after=None, stop_below=None)
    for candidate in early_stops(explorer, sigmas(explorer.steps), pool, keep):
        stages = candidate.stages("", explorer.solver, keep, sigmas)
        name, kept = label(stages, levels_at(stages, sigmas)), [stage.keep for stage in stages]
        share = ratio_of_sums(gap_of_prompts(simulate(stages, scores, merits), truth, keep), gaps)
        stops.append(EarlyStop(candidate, name, kept, sum(velocities_per_prompt([*stages, regenerate], pool)), *share))
    return sorted(stops, key=lambda stop: (stop.velocities, -stop.gap_kept))


def cheapest(stops: Sequence[EarlyStop], family: str, min_gap: float) -> EarlyStop | None:
    """Return the first of ``family`` that keeps ``min_gap`` of the gap; without one, the one that keeps most.

    A share that is smaller by at most its standard error is enough.
    """
    of_family = [stop for stop in stops if stop.family == family]
    enough = (stop for stop in of_family if stop.enough(min_gap))
    return next(enough, max(of_family, key=lambda stop: stop.gap_kept, default=None))


def levels_at(stages: Sequence[Stage], sigmas: Sigmas) -> list[str]:
    """Return the noise level from which each stage predicts the images that it scores, rounded up."""
    return [level_of(stage.end, sigmas(stage.steps)) for stage in stages]


def label(stages: Sequence[Stage], levels: Sequence[str]) -> str:
    """Return the steps of exploration, and the noise levels of early stops: ``4 of 10 steps (0.70)``."""
    text = steps_label(stages)
    return f"{text} ({'/'.join(levels)})" if " of " in text else text
