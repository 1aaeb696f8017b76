"""Several rewards at once: their weighted sum trains, each is logged, and those of weight 0 are only evaluated.

The sum is of raw scores, as Flow-GRPO and DiffusionNFT have it: weights also have to even out the scales (ImageReward
spans several units, the others some tenths).

Shapes: B images, R rewards.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from solrl_lightning.rewards.base import Reward


class WeightedRewards:
    """R rewards by name, with their weights.

    ``name`` is what the sum is called in curves and tables: the reward's own name where there is only one.
    """

    def __init__(self, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> None:
        self.rewards = dict(rewards)
        self.weights = {name: float(weights[name]) for name in rewards}
        self.name = next(iter(self.rewards)) if len(self.rewards) == 1 else "weighted_sum"

    @property
    def for_training(self) -> "WeightedRewards":
        """Those that rollouts score: the ones with a weight."""
        names = [name for name, weight in self.weights.items() if weight != 0]
        chosen = WeightedRewards({name: self.rewards[name] for name in names}, self.weights)
        chosen.name = self.name
        return chosen

    def check_prompts(self, prompts: list[str]) -> None:
        """Raises ``UserError`` for a prompt that one of them cannot score."""
        for reward in self.rewards.values():
            reward.check_prompts(prompts)

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        """float32 [B, R]: the raw score of every reward, in the order of ``rewards``; see ``Reward.__call__``."""
        return torch.stack([reward(images, prompts) for reward in self.rewards.values()], dim=-1)

    def total(self, scores: Tensor) -> Tensor:
        """[...]: the weighted sum of scores [..., R]."""
        weights = torch.tensor(list(self.weights.values()), dtype=scores.dtype, device=scores.device)
        return scores @ weights
