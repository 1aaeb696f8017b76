"""Logs mean and spread of an iteration's rewards over the samples of all ranks, and how far the policy has moved."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.callbacks.common import log_values, loop_of, module_of, moments

log = logging.getLogger(__name__)


class RolloutStats(Callback):
    """Logs ``reward/mean`` and ``reward/std`` of the kept samples and ``explore/proxy_reward``, the mean of the pool.

    A reward that counts what it costs, such as the tokens of reward=vlm, adds ``reward/<name>_<cost>`` so far.

    With several rewards these are statistics of the weighted sum, and ``reward/<name>`` is the mean of one reward over
    the kept samples. ``reward/std`` is the population standard deviation over all kept samples, which scales the
    advantages; ``reward/group_std`` is the mean over prompts of that within a prompt, and
    ``reward/zero_std_fraction`` the share of prompts whose kept rewards are all equal. Families of one stage log no
    ``explore/proxy_reward``.

    With explorers=ray, of the exploration: ``explore/lag``, by how many iterations its weights were older than the
    policy's, ``explore/explorers``, how many answer, ``explore/explorer_seconds``, their seconds together, and
    ``explore/explorers_lost``, how often one was lost.

    ``policy/base_distance`` and ``policy/old_distance`` are the L2 norms of the trained weights' difference from the
    weights of the base and of the old policy, relative to the norm of the base's, after the optimiser step and before
    the old policy follows it.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self._costs: dict[str, float] = {}  # of the rewards, so far
        self._costs_before: dict[str, float] = {}  # of them, in the runs that this one resumes

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = loop_of(trainer)
        rewards = loop.rollouts.rewards  # [P, K]
        moments_of_rewards = moments(trainer, rewards)
        all_equal = (rewards == rewards[:, :1]).all(dim=1)  # [P]
        self.last = {
            "reward/mean": moments_of_rewards.mean,
            "reward/std": moments_of_rewards.std,
            "reward/group_std": moments(trainer, rewards.std(dim=1, correction=0)).mean,
            "reward/zero_std_fraction": moments(trainer, all_equal).mean,
        }
        names = list(module_of(pl_module).rewards.for_training.rewards)
        if len(names) > 1:
            each = loop.rollouts.scores.flatten(0, 1)
            self.last |= {f"reward/{name}": moments(trainer, each[:, i]).mean for i, name in enumerate(names)}
        explorers = module_of(pl_module).transformers.explorers
        elsewhere: Mapping[str, int] = {} if explorers is None else explorers.costs
        for name, count in module_of(pl_module).rewards.costs.items():
            cost = torch.tensor(float(count + elsewhere.get(name, 0)))
            key, of_all_ranks = f"reward/{name}", float(trainer.strategy.reduce(cost, reduce_op="sum"))
            self._costs[key] = self._costs_before.get(key, 0.0) + of_all_ranks
        self.last |= self._costs
        if loop.explored is not None:
            pool = loop.explored.rewards
            finite = pool[torch.isfinite(pool)]  # selection skips candidates whose proxy reward is not finite
            self.last["explore/proxy_reward"] = moments(trainer, finite).mean
        for name, value in ({} if explorers is None else explorers.metrics()).items():
            reduce_op = "mean" if name == "lag" else "sum"
            total = trainer.strategy.reduce(torch.tensor(float(value)), reduce_op=reduce_op)
            self.last[f"explore/{name}"] = float(total)
        self.last |= {f"policy/{name}": float(value) for name, value in module_of(pl_module).distances.items()}
        if trainer.current_epoch == 0 and self.last["reward/zero_std_fraction"] == 1:
            log.warning("the rewards of each prompt's samples are all equal: nothing can be learnt from them")
        log_values(pl_module, self.last)

    def state_dict(self) -> dict[str, Any]:
        return {"costs": self._costs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._costs_before = dict(state_dict["costs"])
