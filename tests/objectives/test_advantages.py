from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import Tensor

from solrl_lightning.objectives.advantages import group_advantages


def test_advantages_are_prompt_centred_and_scaled_by_one_population_std() -> None:
    rewards = torch.tensor([[1.0, 3.0], [10.0, 14.0]])
    std = np.std([1, 3, 10, 14])  # 5.244: the spread between prompts counts
    expected = np.array([[-1, 1], [-2, 2]]) / (std + 1e-4)
    advantages = group_advantages(rewards)
    assert advantages.dtype == torch.float32
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


def test_equal_rewards_give_zero_advantages() -> None:
    assert torch.equal(group_advantages(torch.full((3, 4), 0.7)), torch.zeros(3, 4))
    assert torch.equal(group_advantages(torch.rand(3, 1)), torch.zeros(3, 1))


def test_advantages_are_invariant_to_large_offset() -> None:
    rewards = torch.tensor([[0.25, 0.5, 1.0], [0.125, 0.75, 0.5]])
    torch.testing.assert_close(group_advantages(rewards + 4096), group_advantages(rewards), rtol=1e-6, atol=0)


def all_reduce_between(num_ranks: int) -> Callable[[int], Callable[[Tensor], Tensor]]:
    """The sums over ranks that run as threads, by the number of the rank."""
    parts, barrier = [torch.empty(0)] * num_ranks, Barrier(num_ranks)

    def all_reduce_sum(rank: int, part: Tensor) -> Tensor:
        assert part.dtype == torch.float64
        parts[rank] = part
        barrier.wait(timeout=30)
        total = torch.stack(parts).sum(dim=0)
        barrier.wait(timeout=30)
        return total

    return lambda rank: partial(all_reduce_sum, rank)


@pytest.mark.parametrize("bounds", [[0, 2, 4, 6], [0, 1, 6], [0, 0, 6]])
def test_advantages_are_independent_of_distribution_over_ranks(bounds: list[int]) -> None:
    rewards = torch.rand(6, 24, generator=torch.Generator().manual_seed(0))
    parts = [rewards[first:last] for first, last in zip(bounds, bounds[1:], strict=False)]
    sums = all_reduce_between(len(parts))
    with ThreadPoolExecutor(len(parts)) as threads:
        futures = [threads.submit(group_advantages, part, all_reduce_sum=sums(n)) for n, part in enumerate(parts)]
    advantages = [future.result() for future in futures]
    torch.testing.assert_close(torch.cat(advantages), group_advantages(rewards), rtol=1e-6, atol=0)
