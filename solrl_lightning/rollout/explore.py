"""Run the stages of a family in order, each on the candidates that the previous one kept.

A family has one stage, or one or more stages that explore (rungs) followed by one that regenerates.

Shapes: P prompts, N pool, K candidates of a stage, S sets of kept candidates.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.rollout.chunks import check_selectable
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.rollout.select import deal, rerank, select_contrastive, take
from solrl_lightning.rollout.stage import Stage, with_next
from solrl_lightning.sampling import SolverState

RunStage = Callable[[Stage, Tensor, SolverState | None, bool], Candidates]
"""Stage, seeds [P, K], a state (None: the seeds' noise), and whether the new states are read -> scored candidates."""


class Kept(NamedTuple):
    """The last selection, in sets; an iteration trains on one of them."""

    seeds: Tensor  # [P, S, K] int64
    merits: Tensor  # [P, S, K] float32, by which they were selected


class Explored(NamedTuple):
    """Result of the stages of an iteration."""

    pool: Candidates  # [P, N] of the first stage, without their state; later stages that select reorder its merits
    regenerated: Candidates  # [P, K] of the last stage, which is the only one in a family without exploration
    kept: Kept  # its first set is the one regenerated


def run_family(stages: Sequence[Stage], seeds: Tensor, texts: list[str], run: RunStage, sets: int = 1) -> Explored:
    """Return the results of ``stages`` on seeds [P, N]; a stage with ``keep`` selects the candidates of the next one.

    The last selection is of ``sets`` times as many candidates, dealt into that many sets, for as many iterations.

    Raises:
        NonFiniteError: too few candidates of a prompt have a finite reward.
    """
    pool, kept, state = None, None, None
    last = max(index for index, stage in enumerate(stages) if stage.keep is not None)
    places = torch.arange(seeds.shape[1]).expand_as(seeds)  # indices into the pool
    for index, (stage, following) in enumerate(with_next(stages)):
        continued = following is not None and stage.continues_in(following)
        candidates = run(stage, seeds, state, continued or following is None)
        if pool is None:
            pool = candidates._replace(state=None)  # so that the latents are freed before the next stage runs
        elif stage.keep is not None:
            pool = pool._replace(merits=rerank(pool.merits, places, candidates.merits))
        if stage.keep is not None:
            number = sets if index == last else 1
            check_selectable(candidates.merits, number * stage.keep, texts)
            extremes = deal(select_contrastive(candidates.merits, number * stage.keep), number)
            values = candidates.seeds, candidates.merits
            kept = Kept(*(torch.stack([take(each, chosen) for chosen in extremes], dim=1) for each in values))
            candidates, places = candidates.take(extremes[0]), places.gather(1, extremes[0].cpu())
        seeds = candidates.seeds
        state = candidates.state if continued else None
    assert pool is not None and kept is not None, "a family has a stage that selects"
    return Explored(pool, candidates, kept)
