"""The stages of a family, on candidates made up here."""

import weakref

import torch
from torch import Tensor

from solrl_lightning.rollout.explore import run_stages
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.sampling import SolverState, start


def test_latents_of_the_pool_are_freed_before_the_kept_candidates_are_sampled() -> None:
    alive: list[weakref.ref[Tensor]] = []
    states = []

    def run(stage: Stage, seeds: Tensor, initial_state: SolverState | None) -> Candidates:
        states.append((initial_state is not None, [latents() is not None for latents in alive]))
        state = start(torch.randn(*seeds.shape, 4))
        state = state._replace(step=1, x0=torch.randn_like(state.x))
        alive[:] = map(weakref.ref, (state.x, state.x0))
        return Candidates(seeds, state, seeds.float(), seeds.float()[..., None])

    rung = Stage("explore", "merged", 3, "euler", 1, keep=4)
    stages = [rung, rung._replace(stop_step=2, keep=2), Stage("regenerate", "merged", 3, "euler")]
    pool, kept, proxy_rewards = run_stages(stages, torch.arange(6).expand(2, 6), ["a", "b"], run)
    assert states == [(False, []), (True, [False, False]), (True, [False, False])]
    assert pool.state is None and pool.rewards.shape == (2, 6)
    assert kept.x0.shape == (2, 2, 4) and proxy_rewards.shape == (2, 2)
