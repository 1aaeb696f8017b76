"""Logs mean and spread of an iteration's rewards over the samples of all ranks.

Ranks may hold different numbers of prompts, or none, so sums and counts are reduced, not means.
"""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.callbacks.common import log_values, loop_of, module_of, moments


class RolloutStats(Callback):
    """Logs ``reward/mean`` and ``reward/std`` of the kept samples and ``explore/proxy_reward``, the mean of the pool.

    With several rewards these are statistics of the weighted sum, and ``reward/<name>`` is the mean of one reward over
    the kept samples. ``reward/std`` is the population standard deviation over all kept samples, which scales the
    advantages. Families of one stage log no ``explore/proxy_reward``.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = loop_of(trainer)
        kept = moments(trainer, loop.rollouts.rewards)
        self.last = {"reward/mean": kept.mean, "reward/std": kept.std}
        names = list(module_of(pl_module).rewards.for_training.rewards)
        if len(names) > 1:
            each = loop.rollouts.scores.flatten(0, 1)
            self.last |= {f"reward/{name}": moments(trainer, each[:, i]).mean for i, name in enumerate(names)}
        if loop.explored is not None:
            pool = loop.explored.rewards
            finite = pool[torch.isfinite(pool)]  # selection skips candidates whose proxy reward is not finite
            self.last["explore/proxy_reward"] = moments(trainer, finite).mean
        log_values(pl_module, self.last)
