"""Advantages from the BF16 rewards of the kept samples, in the form of Sol-RL's published code.

The mean is per prompt, the standard deviation is global over all ranks; both are over the K kept samples, not over the
pool of N. The losses clip the advantages.

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
    """Return float32 [P, K]: (reward - mean of its prompt) / (global population std + eps), from rewards [P, K].

    `all_reduce_sum` returns the sum over ranks of a small float64 tensor; a rank may have no prompts. Computed in
    float64, so that the result does not depend on the distribution of prompts over ranks.
    """
    rewards = rewards.double()
    count = torch.tensor(float(rewards.numel()), dtype=torch.float64, device=rewards.device)
    count, total = all_reduce_sum(torch.stack([count, rewards.sum()]))
    squares = all_reduce_sum((rewards - total / count).square().sum())
    std: Tensor = (squares / count).sqrt()
    return ((rewards - rewards.mean(dim=1, keepdim=True)) / (std + eps)).float()
