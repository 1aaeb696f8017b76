"""The training set of an iteration: every kept sample at its timesteps, cut into equal micro-batches.

Each rank has the same number of micro-batches of the same size, or the gradient all-reduce would deadlock; where rows
are missing, rows of weight 0 fill up. Weights are such that the step's gradient is the mean over all real rows of all
ranks.

Shapes: P prompts of this rank, K kept, B micro-batch.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.rollout.records import Rollouts
from solrl_lightning.rollout.seeds import train_timesteps, training_noise
from solrl_lightning.rollout.stage import Conditioning, Prompts


class TrainingBatch(NamedTuple):
    """One micro-batch."""

    x0: Tensor  # [B, ...] float32
    x_t: Tensor  # [B, ...] float32, (1 - sigma) x0 + sigma eps
    sigma: Tensor  # [B] float32
    advantage: Tensor  # [B] float32
    weight: Tensor  # [B] float32, 0 for filled-up rows
    conditioning: Conditioning  # each [B, ...]
    prompts: list[str]  # B texts
    seeds: Tensor  # [B] int64


class Plan(NamedTuple):
    """How many micro-batches of how many rows every rank trains on."""

    micro_batches: int
    rows: int


def plan(prompts: int, keep: int, timesteps: int, micro_batch: int, ranks: int) -> Plan:
    """``prompts`` is the number of all ranks together; ``micro_batch`` the most rows that fit at once."""
    rows = ceil(prompts / ranks) * keep * timesteps
    micro_batches = ceil(rows / micro_batch)
    return Plan(micro_batches, ceil(rows / micro_batches))


class TrainingRows(Sequence[TrainingBatch]):
    """The micro-batches of one rank, built one at a time."""

    def __init__(
        self, rollouts: Rollouts, prompts: Prompts, sigmas: Tensor, fraction: float, plan: Plan, share: float
    ) -> None:
        """``share`` is this rank's part of the mean: the number of ranks over the number of real rows of all ranks."""
        steps = train_timesteps(rollouts.seeds.flatten(), len(sigmas) - 1, fraction)  # [P * K, timesteps]
        self._rollouts, self._prompts, self._sigmas, self._plan = rollouts, prompts, sigmas, plan
        self._steps = steps.flatten()
        self._samples = torch.arange(steps.shape[0]).repeat_interleave(steps.shape[1])
        self._weight = share * plan.micro_batches * plan.rows

    def __len__(self) -> int:
        return self._plan.micro_batches

    def __getitem__(self, number: int) -> TrainingBatch:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        rows = torch.arange(number * self._plan.rows, (number + 1) * self._plan.rows)
        real = rows < len(self._samples)
        rows = rows.remainder(len(self._samples))
        samples, steps = self._samples[rows], self._steps[rows]
        texts, conditioning = self._prompts.rows(samples // self._rollouts.seeds.shape[1])
        seeds = self._rollouts.seeds.flatten()[samples]
        latents = self._rollouts.latents.flatten(0, 1)
        x0 = latents[samples.to(latents.device)]
        sigma = self._sigmas.to(x0.device)[steps.to(x0.device)]
        eps = training_noise(seeds, steps, x0.shape[1:]).to(x0.device)
        advantage = self._rollouts.advantages.flatten().to(x0.device)[samples.to(x0.device)]
        return TrainingBatch(
            x0=x0,
            x_t=torch.lerp(x0, eps, sigma.view(-1, *[1] * (x0.ndim - 1))),
            sigma=sigma,
            advantage=advantage,
            weight=(real * self._weight).to(x0.device, torch.float32),
            conditioning=conditioning,
            prompts=texts,
            seeds=seeds,
        )
