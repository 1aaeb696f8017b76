"""A reward that is easy to exploit, to see the guard at work (docs/guard.md): the mean of all pixels.

PYTHONPATH=dev/guard python -m solrl_lightning --config-dir dev/guard reward=[shapes,brightness] \\
    reward.brightness.weight=20 callbacks.guard.stop=true
"""

from torch import Tensor

from solrl_lightning.rewards.base import Reward


class Brightness(Reward):
    name = "brightness"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return images.mean((1, 2, 3))
