"""Advantages from the merits of the kept samples, in the forms of the published codes.

Mean and standard deviation are over the K kept samples, not over the pool of N. Most losses clip the advantages.

Shapes: P prompts of this rank, K kept.
"""

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Small float64 tensor -> its sum over all ranks."""


def group_advantages(merits: Tensor, eps: float = 1e-4, all_reduce_sum: AllReduce = lambda total: total) -> Tensor:
    """Return float32 [P, K]: (merit - mean of its prompt) / (std over all prompts + eps), from merits [P, K].

    The form of Flow-GRPO, DiffusionNFT, AWM and Sol-RL; the divisor of the variance is the number of samples. A rank
    may have no prompts. Computed in float64, so the result does not depend on how prompts are distributed to ranks.
    """
    merits = merits.double()
    count = torch.tensor(float(merits.numel()), dtype=torch.float64, device=merits.device)
    count, total = all_reduce_sum(torch.stack([count, merits.sum()]))
    squares = all_reduce_sum((merits - total / count).square().sum())
    std: Tensor = (squares / count).sqrt()
    return ((merits - merits.mean(dim=1, keepdim=True)) / (std + eps)).float()


def per_prompt_advantages(merits: Tensor, eps: float = 1e-8) -> Tensor:
    """Return float32 [P, K]: (merit - mean of its prompt) / (std of its prompt + eps), from merits [P, K].

    The form of DanceGRPO; the standard deviation has divisor K - 1.
    """
    merits = merits.double()
    centred = merits - merits.mean(dim=1, keepdim=True)
    return (centred / (merits.std(dim=1, keepdim=True) + eps)).float()
