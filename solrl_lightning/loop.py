"""The training loop: one Lightning epoch is one iteration, explore -> select -> regenerate -> train.

Lightning's private names are used in this file only; ``tests/test_loop.py`` is the tripwire for an upgrade.

1. ``trainer.fit_loop`` is replaced before ``fit``. The rollout runs at the head of the epoch, after
   ``on_train_epoch_start`` (where the shadow is re-quantised) and before the first micro-batch is fetched.
2. Prompts and seeds are functions of (seed, iteration), so a resume needs only the iteration, and an iteration that was
   cut short is done again from its start.
"""

import time
from itertools import pairwise
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops import _FitLoop, _Loop
from torch import Tensor

from solrl_lightning.data.loaders import RefilledLoader
from solrl_lightning.data.prompts import PromptSchedule
from solrl_lightning.errors import UserError
from solrl_lightning.module import SolRLModule, Stage
from solrl_lightning.rollout.advantages import group_advantages
from solrl_lightning.rollout.records import Candidates, Rollouts
from solrl_lightning.rollout.seeds import pool_seeds
from solrl_lightning.rollout.select import select_contrastive
from solrl_lightning.rollout.stage import Prompts, check_selectable
from solrl_lightning.rollout.training_rows import TrainingBatch, TrainingRows, plan
from solrl_lightning.sampling import SolverState
from solrl_lightning.stopwatch import Stopwatch


class ExploreTrainLoop(_FitLoop):
    """Runs the family's stages over the pool, then trains on what was kept.

    Args:
        trainer: its fit loop is replaced by this one.
        schedule: which prompts each iteration trains on, all ranks together.
        pool, keep: N candidates a prompt, of which K are kept.
        timestep_fraction: share of the solver steps that each kept sample trains on.
        micro_batch: most rows (sample, timestep) in one forward and backward pass.
        seed: of the candidates.
    """

    def __init__(
        self,
        trainer: Trainer,
        schedule: PromptSchedule,
        stages: list[Stage],
        pool: int,
        keep: int,
        timestep_fraction: float,
        micro_batch: int,
        seed: int,
    ) -> None:
        super().__init__(trainer, trainer.fit_loop.min_epochs, trainer.fit_loop.max_epochs)
        self.epoch_loop = trainer.fit_loop.epoch_loop  # it holds the Trainer's max_steps
        self._number_iterations(done=0)
        if schedule.per_iteration < trainer.world_size:
            raise UserError(
                "every device needs at least one prompt an iteration; "
                f"prompts_per_iteration={schedule.per_iteration} on {trainer.world_size} devices. Raise it, or lower "
                "trainer.devices."
            )
        self.schedule, self.stages, self.seed = schedule, stages, seed
        self.pool, self.keep, self.timestep_fraction = pool, keep, timestep_fraction
        timesteps = max(1, int(stages[-1].steps * timestep_fraction))
        self.plan = plan(schedule.per_iteration, keep, timesteps, micro_batch, trainer.world_size)
        self.share = trainer.world_size / (schedule.per_iteration * keep * timesteps)
        self.loader: RefilledLoader[TrainingBatch] = RefilledLoader(self.plan.micro_batches)
        self.stopwatch = Stopwatch(self._clock)
        self.explored: Candidates | None = None
        self.rollouts: Rollouts
        self._evaluate_every = trainer.check_val_every_n_epoch
        trainer.accumulate_grad_batches = self.plan.micro_batches  # one optimiser step per iteration
        trainer.fit_loop = self

    @property
    def _module(self) -> SolRLModule:
        return cast(SolRLModule, self.trainer.lightning_module)

    def advance(self) -> None:
        last = self.trainer.current_epoch + 1 == self.max_epochs
        self.trainer.check_val_every_n_epoch = 1 if last else self._evaluate_every  # a run ends with an evaluation
        self.loader.fill(self.roll_out())
        with self.stopwatch.stage("train"):
            super().advance()

    def roll_out(self) -> TrainingRows:
        """Explores and regenerates this rank's prompts, and lays out the training rows."""
        module, trainer = self._module, self.trainer
        texts = self.schedule.at(trainer.current_epoch)[trainer.global_rank :: trainer.world_size]
        seeds = pool_seeds(self.seed, trainer.current_epoch, texts, self.pool)
        with self.stopwatch.stage(self.stages[0].name):
            prompts = module.encode(texts)
            pool = self._run(self.stages[0], prompts, seeds)
        check_selectable(pool.rewards, self.keep, texts)
        kept = pool.take(select_contrastive(pool.rewards, self.keep))
        proxy_rewards = kept.rewards
        for before, stage in pairwise(self.stages):
            stopped = before.stop_after
            begin = None if stopped is None else SolverState(kept.standing, kept.latents, stopped)
            with self.stopwatch.stage(stage.name):
                kept = self._run(stage, prompts, kept.seeds, begin)
        self.explored = pool if len(self.stages) > 1 else None
        advantages = group_advantages(kept.rewards, all_reduce_sum=self._sum)
        self.rollouts = Rollouts(texts, kept.seeds, kept.latents, proxy_rewards, kept.rewards, kept.scores, advantages)
        sigmas = module.policy.sigmas(self.stages[-1].steps)
        return TrainingRows(self.rollouts, prompts, sigmas, self.timestep_fraction, self.plan, self.share)

    def regenerate(self, prompts: list[str], seeds: Tensor) -> Candidates:
        """Samples and scores seeds [P, n] as the last stage does: BF16, full steps."""
        return self._run(self.stages[-1], self._module.encode(prompts), seeds)

    def _run(self, stage: Stage, prompts: Prompts, seeds: Tensor, begin: SolverState | None = None) -> Candidates:
        with self.trainer.profiler.profile(stage.name):  # type: ignore[attr-defined]
            return self._module.run_stage(stage, prompts, seeds, self.stopwatch.progress, begin)

    def _sum(self, value: Tensor) -> Tensor:
        total = self.trainer.strategy.reduce(value.to(self.trainer.strategy.root_device), reduce_op="sum")
        return total.to(value.device)

    def _clock(self) -> float:
        if self.trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # a stage is charged for the kernels that it launched
        return time.perf_counter()

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Continues after the last iteration that stepped; one that was cut short is done again."""
        super().load_state_dict(state_dict, prefix)
        done = self.trainer.global_step
        for progress in (self.epoch_progress.current, self.epoch_progress.total):
            for counter in ("ready", "started", "processed", "completed"):
                setattr(progress, counter, done)
        self._number_iterations(done)
        # _FitLoop's own setter insists on True whenever max_steps is set
        _Loop.restarting.fset(self, False)  # type: ignore[attr-defined]

    def _number_iterations(self, done: int) -> None:
        """Loggers number an iteration by the optimiser steps done when it ends; Lightning's own numbers start at 0."""
        self.epoch_loop._batches_that_stepped = done + 1
