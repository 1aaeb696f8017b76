"""A reward of explorers, in a module that their processes can import."""

import torch
from torch import Tensor

from solrl_lightning.rewards.base import Metadata, Reward


class Level(Reward):
    """How near the mean is to the prompt's "level"; NaN for some of the images."""

    images = 0

    @property
    def costs(self) -> dict[str, int]:
        return {"images": self.images}

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        self.images += len(images)
        means = images.mean((1, 2, 3))
        scores = -(means - torch.tensor([row["level"] for row in metadata])).abs()
        return scores.where((1000 * means).int() % 10 != 0, torch.nan)
