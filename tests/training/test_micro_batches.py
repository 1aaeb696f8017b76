"""Samples, noise levels and weights of the training rows, in closed form over all ranks."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from solrl_lightning.build import build_objective
from solrl_lightning.data.prompt import Prompt, identities
from solrl_lightning.objectives.nft import NFT
from solrl_lightning.options.run import Run
from solrl_lightning.rollout.records import EncodedPrompts, Rollouts, TrainingBatch
from solrl_lightning.sampling import RecordedSteps
from solrl_lightning.seeds import pool_seeds, train_timesteps, training_noise
from solrl_lightning.training.micro_batches import MicroBatches, plan_micro_batches, try_out

KEEP, STEPS, FRACTION, TIMESTEPS, SHAPE = 3, 4, 0.5, 2, (2, 5)
SIGMAS = torch.tensor([1.0, 0.9, 0.6, 0.2, 0.0])


class Rank(NamedTuple):
    rollouts: Rollouts
    rows: MicroBatches


def ranks(prompts: int, world: int, micro_batch: int, optimizer_steps: int = 1) -> list[Rank]:
    """Return the micro-batches of every rank; latents and advantages are arbitrary but distinct."""
    plan = plan_micro_batches(prompts, KEEP * TIMESTEPS, micro_batch, world, optimizer_steps)
    objective = NFT(beta=1.0, kl_weight=0.0, advantage_clip=5.0, timestep_fraction=FRACTION)
    each = [Prompt(f"prompt {number}") for number in range(prompts)]
    actual = []
    for rank in range(world):
        mine = each[rank::world]
        seeds = pool_seeds(0, 0, identities(mine), KEEP)
        latents = torch.randn(len(mine), KEEP, *SHAPE, generator=torch.Generator().manual_seed(rank))
        rewards = torch.arange(len(mine) * KEEP, dtype=torch.float32).view(len(mine), KEEP) + 100 * rank
        rollouts = Rollouts(mine, seeds, latents, rewards, rewards, rewards[..., None], rewards - 50)
        identity = torch.tensor([float(prompt.text.split()[1]) for prompt in mine])
        encoded = EncodedPrompts(mine, {"identity": identity, "embedding": identity[:, None].expand(-1, 4)})
        actual.append(Rank(rollouts, MicroBatches(rollouts, encoded, SIGMAS, objective, plan)))
    return actual


def real(batch: TrainingBatch) -> Tensor:
    return batch.weight > 0


def value(batch: TrainingBatch) -> Tensor:
    """Return some function of each row [B] in place of a loss."""
    return batch.x_t.flatten(1).sum(1) * batch.sigma + batch.advantage


@pytest.mark.parametrize(
    ("prompts", "world", "micro_batch", "expected"),
    [
        (4, 1, 96, (1, 24)),
        (4, 1, 23, (2, 12)),
        (4, 1, 7, (4, 6)),
        (4, 1, 1, (24, 1)),
        (3, 2, 5, (3, 4)),
        (7, 4, 5, (3, 4)),
    ],
)
def test_plan_balances_micro_batches(prompts: int, world: int, micro_batch: int, expected: tuple[int, int]) -> None:
    actual = plan_micro_batches(prompts, KEEP * TIMESTEPS, micro_batch, world)
    assert (actual.micro_batches, actual.rows) == expected
    largest_share = -(-prompts // world) * KEEP * TIMESTEPS
    assert actual.rows <= micro_batch
    assert largest_share <= actual.micro_batches * actual.rows < largest_share + actual.micro_batches


@pytest.mark.parametrize(("prompts", "world", "micro_batch"), [(2, 1, 96), (2, 1, 5), (3, 2, 5), (7, 3, 4), (4, 4, 6)])
def test_averaged_gradient_is_mean_over_real_rows(prompts: int, world: int, micro_batch: int) -> None:
    """Lightning divides each loss by the number of micro-batches, and DDP averages over the ranks."""
    everyone = ranks(prompts, world, micro_batch)
    assert len({(len(rank.rows), len(rank.rows[0].seeds)) for rank in everyone}) == 1
    actual = torch.zeros((), dtype=torch.float64)
    for rank in everyone:
        for batch in rank.rows:
            loss = (value(batch).double() * batch.weight.double()).mean()
            actual += loss / len(rank.rows) / world

    rows = []  # by the definition
    for rank in everyone:
        for p in range(len(rank.rollouts.prompts)):
            for k in range(KEEP):
                seed = rank.rollouts.seeds[p, k].view(1)
                for step in train_timesteps(seed, STEPS, FRACTION)[0]:
                    sigma, x0 = SIGMAS[step], rank.rollouts.x0[p, k]
                    x_t = (1 - sigma) * x0 + sigma * training_noise(seed, step.view(1), SHAPE)[0]
                    rows.append(float(x_t.sum() * sigma + rank.rollouts.advantages[p, k]))
    assert len(rows) == prompts * KEEP * TIMESTEPS
    assert float(actual) == pytest.approx(sum(rows) / len(rows), rel=1e-5)


def test_weights_of_uneven_ranks() -> None:
    """3 prompts on 2 ranks: 12 and 6 real rows in 3 micro-batches of 4; a row counts 1/18 of the mean."""
    first, second = ranks(prompts=3, world=2, micro_batch=5)
    assert [len(rank.rows) for rank in (first, second)] == [3, 3]
    weight = Fraction(2, 18) * 3 * 4  # ranks / rows, times the number of averaged rows
    for rank, real_rows in ((first, 12), (second, 6)):
        weights = torch.cat([batch.weight for batch in rank.rows])
        torch.testing.assert_close(weights, torch.tensor([float(weight)] * real_rows + [0.0] * (12 - real_rows)))


@pytest.mark.parametrize("steps", [1, 4])
def test_the_first_rows_are_those_that_are_no_padding(steps: int) -> None:
    for rank in ranks(prompts=3, world=2, micro_batch=5, optimizer_steps=steps):
        for batch in rank.rows:
            assert real(batch).tolist() == [row < batch.real for row in range(len(batch.weight))]
            first = batch.first(batch.real)
            assert first.prompts == batch.prompts[: batch.real] and torch.equal(first.x_t, batch.x_t[real(batch)])
            assert torch.equal(first.conditioning["embedding"], batch.conditioning["embedding"][real(batch)])
        assert sum(batch.real for batch in rank.rows) == rank.rollouts.seeds.numel() * TIMESTEPS


def test_fields_of_a_row_belong_to_one_sample() -> None:
    for rank in ranks(prompts=5, world=2, micro_batch=4):
        seeds = rank.rollouts.seeds.flatten().tolist()
        for batch in rank.rows:
            place = torch.tensor([seeds.index(seed) for seed in batch.seeds.tolist()])  # also of padding
            assert torch.equal(batch.x0, rank.rollouts.x0.flatten(0, 1)[place])
            assert torch.equal(batch.advantage, rank.rollouts.advantages.flatten()[place])
            assert batch.prompts == [rank.rollouts.prompts[i // KEEP] for i in place]
            number = torch.tensor([float(prompt.text.split()[1]) for prompt in batch.prompts])
            assert torch.equal(batch.conditioning["identity"], number)
            assert torch.equal(batch.conditioning["embedding"], number[:, None].expand(-1, 4))
            steps = torch.tensor([SIGMAS.tolist().index(sigma) for sigma in batch.sigma.tolist()])
            sigma, eps = batch.sigma[:, None, None], training_noise(batch.seeds, steps, SHAPE)
            torch.testing.assert_close(batch.x_t, (1 - sigma) * batch.x0 + sigma * eps, rtol=0, atol=1e-6)
            assert {batch.x0.dtype, batch.x_t.dtype, batch.sigma.dtype, batch.advantage.dtype} == {torch.float32}


def test_micro_batches_are_a_sequence() -> None:
    (rank,) = ranks(prompts=2, world=1, micro_batch=5)
    assert len(rank.rows) == len(list(rank.rows)) == 3
    assert torch.equal(rank.rows[2].x_t, list(rank.rows)[2].x_t)
    for beyond in (3, -1):
        with pytest.raises(IndexError):
            rank.rows[beyond]


@pytest.mark.parametrize(("prompts", "world", "optimizer_steps"), [(2, 1, 2), (3, 2, 2), (3, 1, 4), (5, 3, 5)])
def test_each_optimizer_step_averages_disjoint_rows(prompts: int, world: int, optimizer_steps: int) -> None:
    everyone = ranks(prompts, world, 5, optimizer_steps)
    per_step = len(everyone[0].rows) // optimizer_steps
    seen: list[tuple[int, float]] = []
    for step in range(optimizer_steps):
        mean, values = 0.0, []
        for rank in everyone:
            for batch in list(rank.rows)[step * per_step : (step + 1) * per_step]:
                mean += float((value(batch).double() * batch.weight.double()).mean()) / per_step / world
                values += value(batch)[real(batch)].tolist()
                seen += zip(batch.seeds[real(batch)].tolist(), batch.sigma[real(batch)].tolist(), strict=True)
        assert mean == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert len(seen) == len(set(seen)) == prompts * KEEP * TIMESTEPS


@pytest.mark.parametrize("first", [0, 1])
def test_rows_of_recorded_path_are_sampler_transitions(first: int) -> None:
    ((rollouts, rows),) = ranks(prompts=2, world=1, micro_batch=5)
    generator, length = torch.Generator().manual_seed(9), STEPS - first
    x = torch.randn(2, KEEP, length + 1, *SHAPE, generator=generator)
    log_probs = torch.randn(2, KEEP, length, generator=generator)
    objective = replace(rows._objective, timestep_fraction=0.67)  # 2 of 3 or 4
    recorded = rollouts._replace(recorded_steps=RecordedSteps(first, x, log_probs))
    seeds, trained = rollouts.seeds.flatten().tolist(), set()
    for batch in MicroBatches(recorded, rows._prompts, SIGMAS, objective, rows._plan):
        place, steps = torch.tensor([seeds.index(seed) for seed in batch.seeds.tolist()]), batch.step
        assert batch.x_next is not None and batch.log_prob is not None
        assert torch.equal(batch.x_t, x.flatten(0, 1)[place, steps - first])
        assert torch.equal(batch.x_next, x.flatten(0, 1)[place, steps - first + 1])
        assert torch.equal(batch.log_prob, log_probs.flatten(0, 1)[place, steps - first])
        assert torch.equal(batch.sigma, SIGMAS[steps]) and torch.equal(batch.sigma_next, SIGMAS[steps + 1])
        trained |= set(steps.tolist())
    assert trained == set(range(first, STEPS))


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in (Path(__file__).parents[2] / "conf" / "objective").glob("*.yaml"))
)
def test_every_objective_takes_the_batch_of_the_trial(compose: Callable[..., Run], name: str) -> None:
    objective = build_objective(compose(f"objective={name}", "family=diffusionnft").objective)
    try_out(objective, EncodedPrompts([Prompt("a cat")], {}), torch.randn(SHAPE), SIGMAS)
