"""Advantages from the BF16 rewards of the kept samples, in the forms of the published codes.

Mean and standard deviation are over the K kept samples, not over the pool of N. The losses clip the advantages.

Shapes: P prompts of this rank, K kept.
"""

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Small float64 tensor -> its sum over all ranks."""


def group_advantages(rewards: Tensor, eps: float = 1e-4, all_reduce_sum: AllReduce = lambda total: total) -> Tensor:
    """Return float32 [P, K]: (reward - mean of its prompt) / (std over all prompts + eps), from rewards [P, K].

    The form of Flow-GRPO, DiffusionNFT, AWM and Sol-RL; the divisor of the variance is the number of samples. A rank
    may have no prompts. Computed in float64, so the result does not depend on how prompts are distributed to ranks.
    """
    rewards = rewards.double()
    count = torch.tensor(float(rewards.numel()), dtype=torch.float64, device=rewards.device)
    count, total = all_reduce_sum(torch.stack([count, rewards.sum()]))
    squares = all_reduce_sum((rewards - total / count).square().sum())
    std: Tensor = (squares / count).sqrt()
    return ((rewards - rewards.mean(dim=1, keepdim=True)) / (std + eps)).float()


def per_prompt_advantages(rewards: Tensor, eps: float = 1e-8) -> Tensor:
    """Return float32 [P, K]: (reward - mean of its prompt) / (std of its prompt + eps), from rewards [P, K].

    The form of DanceGRPO; the standard deviation has divisor K - 1.
    """
    rewards = rewards.double()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return (centred / (rewards.std(dim=1, keepdim=True) + eps)).float()
