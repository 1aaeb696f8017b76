"""Run the stages of a family in order, each on the candidates that the previous one kept.

A family has one stage, or one or more stages that explore (rungs) followed by one that regenerates.

Shapes: P prompts, N pool, K candidates of a stage.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.rollout.chunks import check_finite_merits, fill_missing
from solrl_lightning.rollout.records import Candidates, EncodedPrompts
from solrl_lightning.rollout.select import rerank, select_contrastive
from solrl_lightning.rollout.stage import Stage, with_next
from solrl_lightning.sampling import SolverState

RunStage = Callable[[Stage, EncodedPrompts, Tensor, SolverState | None], Candidates]
"""Stage, prompts, seeds [P, K], a state to begin from (None: the seeds' noise) -> scored candidates."""


class Explored(NamedTuple):
    """Result of the stages of an iteration."""

    pool: Candidates  # [P, N] of the first stage, without their state, merits as `rerank` leaves them
    regenerated: Candidates  # [P, K] of the last stage, which is the only one in a family without exploration
    proxy_merits: Tensor  # [P, K] float32, by which the last selection has taken them


def run_family(
    stages: Sequence[Stage], prompts: EncodedPrompts, seeds: Tensor, run: RunStage, transitions: range = range(0)
) -> Explored:
    """Return the results of ``stages`` on seeds [P, N]; a stage with ``keep`` selects the candidates of the next one.

    A candidate without a finite reward is not selected; where all are kept, it has the means of its prompt's others.
    ``transitions``: steps of the last stage to record, see `Stage`.

    Raises:
        NonFiniteError: too few candidates of a prompt have a finite reward.
    """
    pool, proxy_merits, state = None, None, None
    places = torch.arange(seeds.shape[1]).expand_as(seeds)  # indices into the pool
    for stage, following in with_next(stages):
        continued = following is not None and stage.continues_in(following)
        recorded = transitions if following is None else range(0)
        how = stage.but(with_states=continued or following is None, transitions=recorded)
        candidates = run(how, prompts, seeds, state)
        if following is None and stage.keep in (None, seeds.shape[1]):  # it trains on all of them
            candidates = fill_missing(candidates, prompts.prompts)
        if pool is None:
            pool = candidates._replace(state=None)  # so that the latents are freed before the next stage runs
        elif stage.keep is not None:
            pool = pool._replace(merits=rerank(pool.merits, places, candidates.merits))
        if stage.keep is not None:
            check_finite_merits(candidates.merits, stage.keep, prompts.prompts)
            extremes = select_contrastive(candidates.merits, stage.keep)
            candidates, places = candidates.take(extremes), places.gather(1, extremes.cpu())
            proxy_merits = candidates.merits
        seeds = candidates.seeds
        state = candidates.state if continued else None
    assert pool is not None and proxy_merits is not None, "a family has a stage that selects"
    return Explored(pool, candidates, proxy_merits)
