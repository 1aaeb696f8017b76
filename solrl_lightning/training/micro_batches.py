"""Split the training rows of an iteration into equal micro-batches.

All ranks have the same number of micro-batches, because DDP's all-reduce would deadlock otherwise; padding rows have
weight 0. The weights make the gradient of an optimiser step the mean over its real rows of all ranks. Step s of S
trains on rows s, s + S, s + 2 S, ... of every rank.

Shapes: P prompts of this rank, K kept, B micro-batch.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.objectives.base import Objective, check_loss
from solrl_lightning.rollout.records import EncodedPrompts, Rollouts, TrainingBatch
from solrl_lightning.sampling.state import RecordedSteps, map_tensors


class MicroBatchPlan(NamedTuple):
    """Sizes and row weights of the micro-batches, equal on all ranks."""

    optimizer_steps: int
    micro_batches: int  # per optimiser step
    rows: int  # per micro-batch
    weights: list[float]  # weight of a real row in each optimiser step


def plan_micro_batches(
    prompts: int, rows_per_prompt: int, micro_batch: int, ranks: int, optimizer_steps: int = 1
) -> MicroBatchPlan:
    """Return the plan for ``prompts`` of all ranks together, with at most ``micro_batch`` rows per micro-batch."""
    most = ceil(ceil(prompts / ranks) * rows_per_prompt / optimizer_steps)
    micro_batches = ceil(most / micro_batch)
    rows = ceil(most / micro_batches)
    each = [len(range(rank, prompts, ranks)) * rows_per_prompt for rank in range(ranks)]
    real = [sum(len(range(step, count, optimizer_steps)) for count in each) for step in range(optimizer_steps)]
    return MicroBatchPlan(
        optimizer_steps, micro_batches, rows, [ranks / count * micro_batches * rows for count in real]
    )


class MicroBatches(Sequence[TrainingBatch]):
    """Micro-batches of one rank, built on access."""

    def __init__(
        self, rollouts: Rollouts, prompts: EncodedPrompts, sigmas: Tensor, objective: Objective, plan: MicroBatchPlan
    ) -> None:
        recorded = rollouts.recorded_steps
        first, levels = (0, len(sigmas) - 1) if recorded is None else (recorded.first, recorded.x.shape[2] - 1)
        steps = first + objective.train_steps(rollouts.seeds.flatten(), levels)  # [P * K, timesteps]
        self._rollouts, self._prompts, self._sigmas = rollouts, prompts, sigmas
        self._objective, self._plan = objective, plan
        self._steps = steps.flatten()
        self._samples = torch.arange(steps.shape[0]).repeat_interleave(steps.shape[1])

    def __len__(self) -> int:
        return self._plan.optimizer_steps * self._plan.micro_batches

    def __getitem__(self, number: int) -> TrainingBatch:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        plan, rollouts = self._plan, self._rollouts
        optimizer_step, micro_batch = divmod(number, plan.micro_batches)
        rows = torch.arange(micro_batch * plan.rows, (micro_batch + 1) * plan.rows)
        rows = rows * plan.optimizer_steps + optimizer_step
        real = rows < len(self._samples)
        rows = rows.remainder(len(self._samples))
        samples, steps = self._samples[rows], self._steps[rows]
        prompts, conditioning = self._prompts.gather(samples // rollouts.seeds.shape[1])
        seeds = rollouts.seeds.flatten()[samples]
        device = rollouts.x0.device
        samples_there, steps_there = samples.to(device), steps.to(device)
        x0 = rollouts.x0.flatten(0, 1)[samples_there]
        sigmas = self._sigmas.to(device)
        if rollouts.recorded_steps is None:
            x_t, x_next, log_prob = self._objective.noisy(x0, seeds, steps, sigmas), None, None
        else:
            first, x, log_probs = map_tensors(lambda tensor: tensor.flatten(0, 1), rollouts.recorded_steps)
            place = steps_there - first
            x_t, x_next = x[samples_there, place], x[samples_there, place + 1]
            log_prob = None if log_probs is None else log_probs[samples_there, place]
        return TrainingBatch(
            x0=x0,
            x_t=x_t,
            x_next=x_next,
            log_prob=log_prob,
            step=steps,
            sigma=sigmas[steps_there],
            sigma_next=sigmas[steps_there + 1],
            advantage=rollouts.advantages.flatten().to(device)[samples_there],
            weight=(real * plan.weights[optimizer_step]).to(device, torch.float32),
            conditioning=conditioning,
            prompts=prompts,
            seeds=seeds,
            optimizer_step=optimizer_step,
            real=int(real.sum()),
        )


def try_out(objective: Objective, prompt: EncodedPrompts, x: Tensor, sigmas: Tensor) -> None:
    """Compute a loss of two candidates of a prompt, whose images and other velocities are noise ``x`` [...].

    Raises:
        UserError: ``objective`` returns no `Loss`.
    """
    steps, merits = len(sigmas) - 1, torch.tensor([[1.0, 0.0]])
    transitions, recorded = objective.transitions(steps, 0), None
    if transitions:
        log_probs = torch.zeros(1, 2, len(transitions), device=x.device) if objective.solver is not None else None
        recorded = RecordedSteps(transitions.start, x.expand(1, 2, len(transitions) + 1, *x.shape), log_probs)
    seeds, x0 = torch.tensor([[0, 1]]), x.expand(1, 2, *x.shape)
    advantages = objective.advantages(merits)
    rollouts = Rollouts(prompt.prompts, seeds, x0, merits, merits, merits[..., None], advantages, recorded)
    rows = 2 * objective.rows_per_sample(steps)
    (batch,) = MicroBatches(rollouts, prompt, sigmas, objective, plan_micro_batches(1, rows, rows, 1))
    velocity = torch.zeros_like(batch.x_t).requires_grad_()
    check_loss(objective, objective(velocity, batch, **dict.fromkeys(objective.needs, batch.x_t)), rows)
