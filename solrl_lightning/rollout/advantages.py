"""Advantages from the BF16 rewards of the kept samples.

The published form: mean per prompt, one standard deviation over everything that is kept, on all ranks. Both are taken
after selection (over the K kept, not over the pool of N). The clip to +-5 belongs to the losses.

Shapes: P prompts of this rank, K kept.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def _one_rank(total: Tensor) -> Tensor:
    return total


def group_advantages(
    rewards: Tensor, eps: float = 1e-4, all_reduce_sum: Callable[[Tensor], Tensor] = _one_rank
) -> Tensor:
    """float32 [P, K]: (reward - mean of its prompt) / (global population std + eps), from rewards [P, K].

    `all_reduce_sum` returns the sum over ranks of a small float64 tensor. Ranks may hold different numbers of prompts,
    even none. In float64, so that the result does not depend on how prompts are spread over ranks.
    """
    rewards = rewards.double()
    count = torch.tensor(float(rewards.numel()), dtype=torch.float64, device=rewards.device)
    count, total = all_reduce_sum(torch.stack([count, rewards.sum()]))
    squares = all_reduce_sum((rewards - total / count).square().sum())
    std: Tensor = (squares / count).sqrt()
    return ((rewards - rewards.mean(dim=1, keepdim=True)) / (std + eps)).float()
