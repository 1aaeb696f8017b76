"""The training loop: one Lightning epoch is one iteration, in five steps. ``iteration.py`` has them on one page.

| step | where |
|---|---|
| requantise | ``callbacks/requantize.py`` of the repository: all samplers get the old policy; ``roll_out`` checks it |
| explore | ``roll_out``: the stages before the last one score the pool by proxy rewards |
| select | ``roll_out``, in ``run_family``: each stage with ``keep`` passes on the best and the worst candidates |
| regenerate | ``roll_out``: the last stage samples and scores what is trained on |
| train | ``advance``: Lightning's epoch over the micro-batches; ``SolRLModule.optimizer_step`` moves the old policy |

A stage is ``SolRLModule.run_stage``, a micro-batch ``SolRLModule.training_step``.

Only this file and ``termination.py`` use private names of Lightning's loops; ``tests/training/test_loop.py`` detects
changes of them.

1. ``trainer.fit_loop`` is replaced before ``fit``. The rollout runs at the start of the epoch, after
   ``on_train_epoch_start`` (which synchronises the samplers) and before the first micro-batch is fetched.
2. Prompts and seeds are functions of (seed, iteration), so a resume needs only the iteration. An interrupted iteration
   is repeated from its start.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops import _FitLoop
from torch import Tensor

from solrl_lightning.data.loaders import RolloutLoader
from solrl_lightning.data.prompt import Prompt, contents, identities
from solrl_lightning.data.prompts import PromptSchedule, digest
from solrl_lightning.errors import UserError
from solrl_lightning.names import AUTO
from solrl_lightning.objectives.base import Objective
from solrl_lightning.policies.guidance import forward_passes
from solrl_lightning.rollout.explore import run_family
from solrl_lightning.rollout.records import Candidates, EncodedPrompts, Rollouts, TrainingBatch
from solrl_lightning.rollout.stage import Stage, candidates_per_prompt, velocities_per_prompt
from solrl_lightning.sampling import SolverState
from solrl_lightning.seeds import pool_seeds, seed_global_generators
from solrl_lightning.training.micro_batches import MicroBatches, plan_micro_batches
from solrl_lightning.training.module import SolRLModule
from solrl_lightning.training.stopwatch import STOPWATCH_STAGES, Stopwatch
from solrl_lightning.training.termination import Termination

_EVALUATE_EVERY = 20  # iterations, at least, with evaluation.every=auto
_SHARE_OF_EVALUATIONS = 1 / 20  # of the passes of the iterations between them

ENCODED_TOGETHER = 4
"""Iterations whose prompts are encoded at once, because the text encoders move to the GPU each time."""


class ExploreTrainLoop(_FitLoop):
    """Runs the family's stages over the pool, then trains on the kept candidates.

    Args:
        trainer: its fit loop is replaced by this one.
        schedule: prompts of each iteration, of all ranks together.
        stages: of the family, from cheap to expensive; one with ``keep`` selects the candidates of the next one.
        pool: N, candidates per prompt.
        objective: determines the training rows.
        micro_batch: maximum number of rows (sample, noise level) in one forward and backward pass.
        optimizer_steps: optimiser steps per iteration, each on an equal share of its rows.
        seed: seed of the candidates.
        evaluate_every: iterations between evaluations; auto: 20, or so many that they take a twentieth of the passes.
        max_seconds: of training, as in ``cost``; the run ends at the end of the iteration that reaches them.
    """

    def __init__(
        self,
        trainer: Trainer,
        schedule: PromptSchedule,
        stages: Sequence[Stage],
        pool: int,
        objective: Objective,
        micro_batch: int,
        optimizer_steps: int,
        seed: int,
        evaluate_every: int | str,
        max_seconds: float | None = None,
    ) -> None:
        super().__init__(trainer, trainer.fit_loop.min_epochs, trainer.fit_loop.max_epochs)
        self.epoch_loop = trainer.fit_loop.epoch_loop  # has the Trainer's min_steps
        self.schedule, self.pool, self.seed = schedule, pool, seed
        self.stages = stages
        self.objective, self.max_seconds = objective, max_seconds
        self.keep = next((stage.keep for stage in reversed(stages) if stage.keep is not None), pool)
        rows = self.keep * objective.rows_per_sample(stages[-1].steps)  # of a prompt
        ranks = trainer.world_size
        self.plan = plan_micro_batches(schedule.per_iteration, rows, micro_batch, ranks, optimizer_steps)
        self.loader: RolloutLoader[TrainingBatch] = RolloutLoader(optimizer_steps * self.plan.micro_batches)
        self.stopwatch = Stopwatch(synchronize=self._synchronize)
        self.termination = Termination(trainer)
        self.iterations_done = 0
        """Iterations that have taken their last optimiser step."""
        self._steps_taken = 0  # in the current iteration
        self._counts = {"evaluations": 0, "samples": 0}  # in finished iterations
        self._seconds_before = 0.0  # in the runs that this one resumes
        self._training_velocities = rows * objective.forward_passes  # for a prompt
        self._encoded: tuple[int, EncodedPrompts] | None = None  # first iteration of those encoded, their prompts
        self.explored: Candidates | None = None
        """The whole pool with its proxy rewards; None in families of one stage."""
        self._rollouts: Rollouts | None = None
        self.few_evaluations = evaluate_every == AUTO
        self._at_least = _EVALUATE_EVERY if self.few_evaluations else int(evaluate_every)
        trainer.check_val_every_n_epoch = self._at_least  # EarlyStopping reads it before the first iteration
        self.ends_again = False
        """Whether the run had trained to its end when it was stopped: it resumes to write its last files only."""
        trainer.accumulate_grad_batches = self.plan.micro_batches
        trainer.fit_loop = self

    @property
    def _module(self) -> SolRLModule:
        return cast(SolRLModule, self.trainer.lightning_module)

    @property
    def rollouts(self) -> Rollouts:
        """The training samples of the latest roll-out."""
        assert self._rollouts is not None, "an iteration begins with its roll-out"
        return self._rollouts

    @property
    def skip(self) -> bool:
        """Whether to call no hook; a run that ends again calls the hooks of its start and end, which write files."""
        return not self.ends_again and super().skip

    @property
    def _is_between_steps(self) -> bool:
        """Whether the iteration has taken some of its optimiser steps: no run resumes from there."""
        return self._steps_taken % self.plan.optimizer_steps != 0

    @property
    def _can_stop_early(self) -> bool:
        """Whether ``trainer.should_stop`` ends the loop here."""
        return super()._can_stop_early and not self._is_between_steps

    def on_run_start(self) -> None:
        super().on_run_start()
        if not self._module.evaluation.comparable:  # the first of another kind, of the state that was loaded
            self.trainer.validating = True
            self.epoch_loop.val_loop.run()
            self.trainer.training = True

    def on_advance_start(self) -> None:
        """Seed what a reward or a callback draws of: it must not depend on the iterations that this process has run."""
        seed_global_generators(self.seed, self.trainer.current_epoch, self.trainer.global_rank)
        super().on_advance_start()

    def advance(self) -> None:
        """Run one iteration; ``callbacks/requantize.py`` has given the old policy to everything that samples.

        Raises:
            UserError: a callback has changed the number of micro-batches of an optimiser step, or ended the iteration.
            RuntimeError: code of the roll-out has raised StopIteration.
        """
        actual, expected = self.trainer.accumulate_grad_batches, self.plan.micro_batches
        if actual != expected:
            raise UserError(
                f"trainer.accumulate_grad_batches={actual} is invalid: a callback has set it, but an optimiser step "
                f"takes all its {expected} micro-batches. Leave that callback out with ~callbacks.<name>."
            )
        self._set_counters()
        try:
            self.loader.fill(self.roll_out())
        except StopIteration as error:  # it would end the loop as if the run had completed
            raise RuntimeError("a StopIteration in the roll-out") from error
        with self.stopwatch.stage("train"):
            super().advance()  # its last optimiser step moves the old policy
        if self._steps_taken < self.plan.optimizer_steps and not self.trainer.should_stop:
            self._raise_ended(
                f"after {self._steps_taken} of {self.plan.optimizer_steps} optimiser steps of an iteration"
            )

    def on_run_end(self) -> None:
        """Check that all iterations have run.

        Raises:
            UserError: a callback has ended the loop by StopIteration.
        """
        if not self.done:
            self._raise_ended(f"after {self.iterations_done} of {self.max_epochs} iterations")
        super().on_run_end()

    def _raise_ended(self, when: str) -> NoReturn:
        raise UserError(
            f"code of a callback or the objective is invalid: it ended training {when}, by StopIteration. Correct it, "
            "or set trainer.should_stop there to end the run."
        )

    def _set_counters(self) -> None:
        """Tell Lightning when to evaluate, and at which step to log."""
        last = self.trainer.current_epoch + 1 == self.max_epochs
        self.trainer.check_val_every_n_epoch = 1 if last else self.evaluate_every  # evaluate after the last one
        # At the end of an epoch Lightning logs at step _batches_that_stepped - 1, which counts the optimiser steps of
        # this epoch, too: (iterations_done + 2 - optimizer_steps) + optimizer_steps - 1 = iterations_done + 1.
        self.epoch_loop._batches_that_stepped = self.iterations_done + 2 - self.plan.optimizer_steps
        self._steps_taken = 0

    def roll_out(self) -> MicroBatches:
        """Explore, select and regenerate on this rank's prompts, and return the training rows.

        Raises:
            UserError: a sampler has other weights than this iteration's old policy.
        """
        self._check_requantised()
        iteration = self.trainer.current_epoch
        with self.stopwatch.stage(self.stages[0].name):
            encoded, seeds = self.pool_of(iteration)
        prompts = encoded.prompts
        transitions = self._transitions(iteration)
        explored, samples, proxy_merits = run_family(self.stages, encoded, seeds, self._run, transitions)
        merits = self._module.rewards.for_training.merits(samples.scores)  # among the samples, not in the pool
        advantages = self.objective.advantages(merits, self._sum)
        self.explored = explored if len(self.stages) > 1 else None
        self._rollouts = Rollouts.of(prompts, samples, proxy_merits, advantages)
        sigmas = self._module.model.sigmas(self.stages[-1].steps)
        return MicroBatches(self._rollouts, encoded, sigmas, self.objective, self.plan)

    def _check_requantised(self) -> None:
        for name, sampler in self._module.transformers.named_samplers():
            if sampler.version != self.iterations_done:
                raise UserError(
                    f"callbacks.requantize is invalid: after {self.iterations_done} iterations the sampler {name} has "
                    f"the weights of {sampler.version}. Use solrl_lightning.callbacks.requantize.Requantize."
                )

    def pool_of(self, iteration: int) -> tuple[EncodedPrompts, Tensor]:
        """Return this rank's P encoded prompts of an iteration, and the seeds [P, N] of their candidates."""
        encoded = self._encode(iteration, self._prompts(iteration))
        return encoded, pool_seeds(self.seed, iteration, identities(encoded.prompts), self.pool)

    def _prompts(self, iteration: int) -> list[Prompt]:
        """Return this rank's prompts."""
        return self.schedule.for_iteration(iteration)[self.trainer.global_rank :: self.trainer.world_size]

    def _encode(self, iteration: int, prompts: list[Prompt]) -> EncodedPrompts:
        """Return ``prompts`` encoded; the prompts of `ENCODED_TOGETHER` iterations are encoded at once and kept."""
        first = iteration - iteration % ENCODED_TOGETHER
        if self._encoded is None or self._encoded[0] != first:
            together = [prompt for i in range(first, first + ENCODED_TOGETHER) for prompt in self._prompts(i)]
            self._encoded = first, self._module.encode(list(dict.fromkeys(together)))
        encoded = self._encoded[1]
        return encoded.gather(torch.tensor([encoded.prompts.index(prompt) for prompt in prompts]))

    def probe(self, prompts: list[Prompt], seeds: Tensor, with_states: bool = False) -> Candidates:
        """Return the candidates of seeds [P, n] sampled by the last stage from their noise, and scored.

        The prompts are some of this iteration, with its encodings: one that is encoded alone may get other rounding.
        The time counts as stage "probe".
        """
        iteration = self.trainer.current_epoch
        recorded = {"with_states": with_states, "transitions": self._transitions(iteration)}
        stage = self.stages[-1].but(name="probe", **recorded)
        return self._run(stage, self._encode(iteration, prompts), seeds, None)

    def _run(self, stage: Stage, prompts: EncodedPrompts, seeds: Tensor, state: SolverState | None) -> Candidates:
        """Run a stage on the clock of its name."""
        with self.stopwatch.stage(stage.name), self.trainer.profiler.profile(stage.name):  # type: ignore[attr-defined]
            return self._module.run_stage(stage, prompts, seeds, state, self.stopwatch.progress)

    def _transitions(self, iteration: int) -> range:
        return self.objective.transitions(self.stages[-1].steps, iteration)

    def _sum(self, value: Tensor) -> Tensor:
        total = self.trainer.strategy.reduce(value.to(self.trainer.strategy.root_device), reduce_op="sum")
        return total.to(value.device)

    def _synchronize(self) -> None:
        if self.trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()

    def count_step(self) -> bool:
        """Count an optimiser step and return whether it is the last of the iteration."""
        self._steps_taken += 1
        last = self._steps_taken == self.plan.optimizer_steps
        self.iterations_done += last
        for name, number in self.cost_of_iteration().items():
            self._counts[name] += last * number
        if last and self.trainer.strategy.broadcast(self.is_time_up):
            self.trainer.should_stop, self.trainer.check_val_every_n_epoch = True, 1  # with a last evaluation
        return last

    @property
    def is_time_up(self) -> bool:
        """Whether this rank has trained for ``max_seconds``."""
        return self.max_seconds is not None and self.cost()["seconds"] >= self.max_seconds

    def iterations_taken(self) -> float:
        """Return the iterations done, with the share of its optimiser steps that the current one has taken."""
        steps = self.plan.optimizer_steps
        return (self.iterations_done * steps + self._steps_taken % steps) / steps

    def cost_of_iteration(self) -> dict[str, int]:
        """Return the forward passes (``evaluations``, as in summary.json) and the scored images of an iteration."""
        prompts = self.schedule.per_iteration
        velocities = prompts * (sum(velocities_per_prompt(self.stages, self.pool)) + self._training_velocities)
        samples = prompts * sum(candidates_per_prompt(self.stages, self.pool))
        forwards = round(velocities * forward_passes(self._module.model.guidance_scale))
        return {"evaluations": forwards, "samples": samples}

    @property
    def passes_without_selection(self) -> float:
        """The forward passes that sample ``keep`` candidates from their noise, divided by the last stage's."""
        return self.keep * self.stages[-1].steps / velocities_per_prompt(self.stages, self.pool)[-1]

    @property
    def cost_of_evaluation(self) -> float:
        """The passes of an evaluation over the passes of an iteration."""
        passes = self._module.evaluation.passes * forward_passes(self._module.model.guidance_scale)
        return passes / self.cost_of_iteration()["evaluations"]

    @property
    def evaluate_every(self) -> int:
        """Iterations between evaluations."""
        few = math.ceil(self.cost_of_evaluation / _SHARE_OF_EVALUATIONS) if self.few_evaluations else 1
        return max(self._at_least, few)

    @property
    def large_share_of_evaluations(self) -> float | None:
        """The share of a whole run's passes that its evaluations take, if it is more than a tenth in spite of ``auto``.

        The one before training and the one at the end are always made.
        """
        if not self.few_evaluations:
            return None
        iterations = cast(int, self.max_epochs)
        number = 1 + math.ceil(iterations / self.evaluate_every)  # at the start, too
        share = number * self.cost_of_evaluation / (iterations + number * self.cost_of_evaluation)
        return share if share > 2 * _SHARE_OF_EVALUATIONS else None

    def cost(self) -> dict[str, float]:
        """Return what the iterations have cost so far, without evaluations, probes and sample grids.

        ``seconds`` of the stages and, of all ranks, ``evaluations`` (forward passes for one image) and ``samples``
        (images decoded and scored; a candidate counts in every stage that scores it).
        """
        seconds = sum(self.stopwatch.seconds.get(stage, 0.0) for stage in STOPWATCH_STAGES)
        return {"seconds": self._seconds_before + seconds, **self._counts}

    def logged_values(self) -> dict[str, Tensor]:
        """Return the values that this iteration has logged; only in ``on_train_epoch_end``. Collective."""
        return self._results.metrics(on_step=False)["log"]

    @cached_property
    def digest_of_prompts(self) -> str:
        """Return the digest of the training prompts, which every checkpoint has."""
        return digest(contents(self.schedule.prompts))

    def on_save_checkpoint(self) -> dict[str, Any]:
        # Only a callback of the user's saves between steps.
        done = self.iterations_taken() if self._is_between_steps else self.iterations_done
        state = {"iterations_done": done, "stopped": self.trainer.should_stop}
        prompts = {"training_prompts": self.digest_of_prompts}
        threads = {"threads": torch.get_num_threads()}
        return super().on_save_checkpoint() | state | prompts | threads | self.cost()

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Resume after the last finished iteration; an interrupted one is repeated."""
        super().load_state_dict(state_dict, prefix)
        state = state_dict[f"{prefix}state_dict"]
        self.iterations_done = state.get("iterations_done", self.trainer.global_step)
        self._counts = {name: state.get(name, 0) for name in self._counts}
        self._seconds_before = state.get("seconds", 0.0)
        self.trainer.should_stop = self.ends_again and state.get("stopped", False)
        for progress in (self.epoch_progress.current, self.epoch_progress.total):
            for counter in ("ready", "started", "processed", "completed"):
                setattr(progress, counter, self.iterations_done)
        self.restarting = False
