"""Weighted sum of several rewards. Every reward is logged; a reward of weight 0 is only evaluated.

The sum is over raw scores, as in Flow-GRPO and DiffusionNFT. Weights must therefore also equalise the scales:
ImageReward spans several units, the others some tenths.

Shapes: B images, R rewards.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from solrl_lightning.rewards.base import Metadata, Reward, call_with_metadata


class WeightedRewards:
    """R rewards by name, with their weights and the metadata of the prompts that have any.

    ``name`` labels the sum in curves and tables: "weighted_sum", or the name of the only reward.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        weights: Mapping[str, float],
        metadata: Mapping[str, Metadata] | None = None,
    ) -> None:
        self.rewards, self.metadata = dict(rewards), metadata or {}
        self.weights = {name: float(weights[name]) for name in rewards}
        self.name = next(iter(self.rewards)) if len(self.rewards) == 1 else "weighted_sum"

    @property
    def for_training(self) -> "WeightedRewards":
        """The rewards that rollouts score: all whose weight is not 0."""
        names = [name for name, weight in self.weights.items() if weight != 0]
        chosen = WeightedRewards({name: self.rewards[name] for name in names}, self.weights, self.metadata)
        chosen.name = self.name
        return chosen

    def check_prompts(self, prompts: list[str]) -> None:
        """Raise ``UserError`` for a prompt that one of the rewards cannot score."""
        for reward in self.rewards.values():
            call_with_metadata(reward.check_prompts, prompts, metadata=self._metadata_of(prompts))

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Raw scores, float32 [B, R], in the order of ``rewards``; raises as ``Reward.__call__`` does.

        Each of several rewards gets its own copy of the images, which it may change in place.
        """
        metadata, several = self._metadata_of(prompts), len(self.rewards) > 1
        scores = [reward(images.clone() if several else images, prompts, metadata) for reward in self.rewards.values()]
        return torch.stack(scores, dim=-1)

    def _metadata_of(self, prompts: list[str]) -> list[Metadata]:
        return [self.metadata.get(prompt, {}) for prompt in prompts]

    def total(self, scores: Tensor) -> Tensor:
        """Weighted sum [...] of scores [..., R]."""
        weights = torch.tensor(list(self.weights.values()), dtype=scores.dtype, device=scores.device)
        return scores @ weights
