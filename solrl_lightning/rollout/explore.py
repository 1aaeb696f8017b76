"""From a pool to the kept candidates: stages in order, each on the candidates that the one before it kept.

A family has one stage, or stages that explore (one, or a race of several rungs) and one that regenerates.

Shapes: P prompts, N pool, K candidates of a stage.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.rollout.records import Candidates
from solrl_lightning.rollout.select import rerank, select_contrastive
from solrl_lightning.rollout.stage import Stage, check_selectable
from solrl_lightning.sampling import SolverState

Run = Callable[[Stage, Tensor, SolverState | None], Candidates]
"""Sample and score seeds [P, K] from a state, or from their noise."""


class Explored(NamedTuple):
    """What came of a pool."""

    pool: Candidates  # [P, N] of the first stage; its rewards are reordered by the later stages that select
    kept: Candidates  # [P, K] of the last stage
    proxy_rewards: Tensor  # [P, K] by which they were selected last


def run_stages(stages: Sequence[Stage], seeds: Tensor, prompts: list[str], run: Run) -> Explored:
    """Sample and score seeds [P, N] in the first stage; a stage with ``keep`` selects those of the next one.

    Raises:
        NonFiniteError: too few candidates of a prompt have a finite reward.
    """
    pool, proxy_rewards, state = None, None, None
    places = torch.arange(seeds.shape[1]).expand_as(seeds)  # in the pool
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        candidates = run(stage, seeds, state)
        if pool is None:
            pool = candidates
        elif stage.keep is not None:
            pool = pool._replace(rewards=rerank(pool.rewards, places, candidates.rewards))
        if stage.keep is not None:
            check_selectable(candidates.rewards, stage.keep, prompts)
            chosen = select_contrastive(candidates.rewards, stage.keep)
            candidates, places = candidates.take(chosen), places.gather(1, chosen.cpu())
            proxy_rewards = candidates.rewards
        seeds = candidates.seeds
        state = candidates.state if following is not None and stage.continues_in(following) else None
    assert pool is not None and proxy_rewards is not None, "a family has a stage that selects"
    return Explored(pool, candidates, proxy_rewards)
