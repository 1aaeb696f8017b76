"""The stages of a family with scores known in closed form; tests/training/test_loop.py runs them on a model."""

import weakref
from typing import Any

import pytest
import torch
from nano import prompts_of
from torch import Tensor

from solrl_lightning.errors import NonFiniteError
from solrl_lightning.rollout.explore import run_family
from solrl_lightning.rollout.records import Candidates, EncodedPrompts
from solrl_lightning.rollout.select import select_contrastive
from solrl_lightning.rollout.stage import EXPLORE, Stage
from solrl_lightning.sampling import SolverState, start

KEEPS = (12, 8, 4)
TRAJECTORY: dict[str, Any] = {"sampler": "merged", "steps": 10, "solver": "euler"}


def encoded(texts: str) -> EncodedPrompts:
    return EncodedPrompts(prompts_of(texts), {})


def scores(seeds: Tensor, stage: int) -> Tensor:
    """Scores of int64 seeds that have another order in every stage."""
    return torch.sin(seeds.double() * (stage + 1.3)).float()


def test_every_rung_selects_from_the_survivors_of_the_one_before() -> None:
    seeds = torch.arange(60).view(3, 20)
    rungs = [Stage(**TRAJECTORY).but(name=EXPLORE, stop_after=2 * i + 2, keep=keep) for i, keep in enumerate(KEEPS)]
    stages = [*rungs, Stage(**TRAJECTORY)]
    ran: list[Tensor] = []

    def run(stage: Stage, _: Any, seeds: Tensor, state: SolverState | None) -> Candidates:
        number = len(ran)
        assert (state is None) == (number == 0) and stage.with_states
        assert stage.transitions == (range(1, 2) if number == len(KEEPS) else range(0))
        assert state is None or torch.equal(state.x[..., 0], seeds)  # the survivors' own trajectories
        ran.append(seeds)
        rewards = scores(seeds, number)
        return Candidates(seeds, start(seeds[..., None]), rewards, rewards[..., None], rewards)

    pool, kept, proxy_merits = run_family(stages, encoded("abc"), seeds, run, range(1, 2))
    expected = [seeds]
    for number, keep in enumerate(KEEPS):
        expected.append(expected[-1].gather(1, select_contrastive(scores(expected[-1], number), keep)))
    assert len(ran) == 4 and all(map(torch.equal, ran, expected))
    assert torch.equal(kept.seeds, expected[3]) and torch.equal(kept.rewards, scores(expected[3], 3))
    assert torch.equal(proxy_merits, scores(expected[3], 2))
    # The pool has the merits of the first rung, in an order that leads to the selections of all rungs.
    assert torch.equal(pool.seeds, seeds)
    assert torch.equal(pool.merits.sort(1).values, scores(seeds, 0).sort(1).values)
    for keep, survivors in zip(KEEPS, expected[1:], strict=True):
        chosen = select_contrastive(pool.merits, keep)
        assert torch.equal(pool.seeds.gather(1, chosen).sort(1).values, survivors.sort(1).values)
    assert torch.equal(pool.seeds.gather(1, chosen), expected[3])


def run_once(keep: int) -> Any:
    """A family of one stage on a pool of 6, of which two candidates have no reward and four have 0 or 1."""
    rewards = torch.tensor([[0.0, torch.nan, 0.0, 1.0, torch.inf, 0.0]])

    def run(stage: Stage, _: Any, seeds: Tensor, state: SolverState | None) -> Candidates:
        return Candidates(seeds, start(seeds[..., None]), rewards, rewards[..., None], rewards)

    return run_family([Stage(**TRAJECTORY).but(keep=keep)], encoded("a"), torch.arange(6)[None], run)


def test_a_family_of_one_stage_selects_no_candidate_without_a_reward() -> None:
    kept = run_once(keep=4).regenerated
    assert kept.seeds.tolist() == [[3, 0, 2, 5]] and kept.rewards.tolist() == [[1, 0, 0, 0]]
    with pytest.raises(NonFiniteError, match="4 of 6 candidates have a finite reward .* fewer than the 5 that are"):
        run_once(keep=5)


def test_a_family_that_keeps_the_pool_trains_on_candidates_without_a_reward_as_on_the_mean() -> None:
    kept = run_once(keep=6).regenerated
    assert sorted(kept.seeds.flatten().tolist()) == list(range(6))
    assert sorted(kept.rewards.flatten().tolist()) == [0, 0, 0, 0.25, 0.25, 1]


def test_latents_of_the_pool_are_freed_before_the_kept_candidates_are_sampled() -> None:
    alive: list[weakref.ref[Tensor]] = []
    states = []

    def run(stage: Stage, _: Any, seeds: Tensor, initial_state: SolverState | None) -> Candidates:
        states.append((initial_state is not None, [latents() is not None for latents in alive]))
        state = start(torch.randn(*seeds.shape, 4))
        state = state._replace(step=1, x0=torch.randn_like(state.x))
        alive[:] = map(weakref.ref, (state.x, state.x0))
        return Candidates(seeds, state, seeds.float(), seeds.float()[..., None], seeds.float())

    rung = Stage(**TRAJECTORY).but(name=EXPLORE, stop_after=1, keep=4)
    stages = [rung, rung.but(stop_after=2, keep=2), Stage(**TRAJECTORY)]
    pool, kept, proxy_merits = run_family(stages, encoded("ab"), torch.arange(6).expand(2, 6), run)
    assert states == [(False, []), (True, [False, False]), (True, [False, False])]
    assert pool.state is None and pool.rewards.shape == (2, 6)
    assert kept.x0.shape == (2, 2, 4) and proxy_merits.shape == (2, 2)


def test_states_are_kept_where_a_stage_continues_them_and_at_the_end() -> None:
    read = []

    def run(stage: Stage, _: Any, seeds: Tensor, state: SolverState | None) -> Candidates:
        read.append((state is not None, stage.with_states))
        state = start(torch.randn(*seeds.shape, 4)) if stage.with_states else None
        return Candidates(seeds, state, seeds.float(), seeds.float()[..., None], seeds.float())

    rung = Stage(**TRAJECTORY).but(name=EXPLORE, stop_after=1, keep=4, sampler="shadow")
    stages = [rung, rung.but(stop_after=2, keep=2), Stage(**TRAJECTORY)]
    run_family(stages, encoded("ab"), torch.arange(6).expand(2, 6), run)
    assert read == [(False, True), (True, False), (False, True)]
