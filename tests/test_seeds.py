"""Seeds and noise are functions of a candidate's identity only. Golden values detect a change of the hash."""

import math

import numpy as np
import pytest
import torch

from solrl_lightning.seeds import (
    evaluation_seeds,
    noise,
    permutation,
    pool_seeds,
    step_noise,
    train_timesteps,
    training_noise,
)


def test_seeds_match_golden_values() -> None:
    assert pool_seeds(42, 3, ["a red circle"], 4).tolist() == [[859294094, 3651782488, 1836105458, 793777742]]
    assert evaluation_seeds(42, ["a red circle"], 4).tolist() == [[3279856673, 1745755888, 3525988746, 635168288]]
    assert train_timesteps(torch.tensor([1, 2]), 10, 0.6).tolist() == [[0, 7, 9, 2, 6, 8], [9, 4, 8, 2, 5, 6]]
    assert permutation("x", 8).tolist() == [2, 4, 6, 3, 7, 0, 1, 5]


def test_noise_matches_golden_values() -> None:
    # PyTorch's vectorised normal differs in the last bit between kinds of CPU.
    assert noise(torch.tensor([5, 2**32 - 1]), (2,)).flatten().tolist() == pytest.approx(
        [-0.48678076, -0.60382158, 1.21976304, -0.39297947], rel=1e-5
    )
    eps = training_noise(torch.tensor([5]), torch.tensor([7]), (3,)).flatten().tolist()
    assert eps == pytest.approx([-0.61125171, -0.92288518, 1.23701894], rel=1e-5)


def test_seeds_are_independent_of_pool_size_and_other_prompts() -> None:
    prompts = ["a red circle above a blue square", "ein grüner Stern", "a red circle"]
    pool = pool_seeds(1, 2, prompts, 96)
    assert pool.shape == (3, 96) and pool.dtype == torch.int64
    assert torch.equal(pool_seeds(1, 2, prompts, 24), pool[:, :24])
    assert torch.equal(pool_seeds(1, 2, prompts[::-2], 96), pool[[2, 0]])


def test_seeds_depend_on_every_part_of_identity() -> None:
    pools = [(1, 2, "a"), (2, 1, "a"), (1, 3, "a"), (12, 2, "a"), (1, 2, "A"), (1, 2, "2/a")]
    variants = [pool_seeds(seed, iteration, [prompt], 8) for seed, iteration, prompt in pools]
    variants += [evaluation_seeds(1, [prompt], 8) for prompt in ("a", "2/a")]
    assert torch.cat(variants).unique().numel() == 8 * len(variants)


def test_seeds_of_a_prompt_are_distinct() -> None:
    n = 200_000  # a stream of this many 32-bit words has about five repeats
    seeds = pool_seeds(0, 0, ["a"], n)
    assert seeds.unique().numel() == n
    assert 0 <= int(seeds.min()) and int(seeds.max()) < 2**32
    assert torch.equal(pool_seeds(0, 0, ["a"], 1000), seeds[:, :1000])


def test_no_prompts_give_no_seeds() -> None:
    assert pool_seeds(0, 0, [], 4).shape == (0, 4)
    assert noise(pool_seeds(0, 0, [], 4), (2, 3)).shape == (0, 4, 2, 3)
    assert train_timesteps(torch.empty(0, dtype=torch.int64), 10, 0.6).shape == (0, 6)


@pytest.mark.parametrize("shape", [(1,), (16,), (17,), (3, 5, 7)])
def test_noise_of_a_seed_is_that_of_a_torch_generator(shape: tuple[int, ...]) -> None:
    seeds, before = pool_seeds(0, 0, ["a", "b"], 7), torch.get_rng_state()
    whole = noise(seeds, shape)
    assert whole.shape == (2, 7, *shape)
    for seed, row in zip(seeds.flatten(), whole.flatten(0, 1), strict=True):
        assert torch.equal(row, torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))))
    training_noise(seeds[0], torch.arange(7), shape)
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_is_standard_normal_and_uncorrelated_between_candidates() -> None:
    x = noise(pool_seeds(0, 0, ["a"], 400)[0], (400,))
    assert abs(float(x.mean())) < 5 / 400
    assert float(x.std()) == pytest.approx(1, abs=5 / 400 / math.sqrt(2))
    correlation = torch.corrcoef(x) - torch.eye(400)
    assert float(correlation.abs().max()) < 6 / math.sqrt(400)


def test_noises_of_training_and_of_solver_steps_are_functions_of_candidate_and_step() -> None:
    seeds, timesteps = torch.tensor([4, 4, 9, 9]), torch.tensor([0, 1, 0, 1])
    eps = training_noise(seeds, timesteps, (64,))
    assert torch.equal(training_noise(seeds[2:], timesteps[2:], (64,)), eps[2:])
    added = [step_noise(torch.tensor([4, 9]), step, (64,)) for step in (0, 1)]
    assert torch.equal(step_noise(torch.tensor([9]), 1, (64,)), added[1][1:])
    rows = torch.cat([eps, *added, noise(torch.tensor([4, 9]), (64,))])
    correlation = torch.corrcoef(rows) - torch.eye(10)
    assert float(correlation.abs().max()) < 0.5


@pytest.mark.parametrize(
    ("num_steps", "fraction", "count"),
    [(10, 0.6, 6), (10, 0.4, 4), (10, 0.99, 9), (10, 1, 10), (4, 0.1, 1), (1, 0.5, 1)],
)
def test_train_timesteps_have_published_count_and_are_distinct(num_steps: int, fraction: float, count: int) -> None:
    steps = train_timesteps(torch.arange(50), num_steps, fraction)
    assert steps.shape == (50, count) and steps.dtype == torch.int64
    assert all(len(set(row)) == count and 0 <= min(row) and max(row) < num_steps for row in steps.tolist())


def test_train_timesteps_are_function_of_candidate_and_uniform() -> None:
    steps = train_timesteps(torch.arange(3000), 10, 0.6)
    assert torch.equal(train_timesteps(torch.tensor([17, 5]), 10, 0.6), steps[[17, 5]])
    for column, tolerance in ((steps.flatten(), 0.01), (steps[:, 0], 0.03)):
        share = np.bincount(column.numpy(), minlength=10) / column.numel()
        assert share == pytest.approx(np.full(10, 0.1), abs=tolerance)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan")])
def test_fraction_outside_range_raises(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction of timesteps"):
        train_timesteps(torch.arange(3), 10, fraction)


def test_permutations_are_permutations() -> None:
    assert sorted(permutation("y", 1000).tolist()) == list(range(1000))
    assert permutation("y", 0).tolist() == []
