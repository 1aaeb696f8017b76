"""The LightningModule: trains and evaluates the BF16 policy, and saves it.

``transformer``, the only registered submodule, is the BF16 policy with its LoRA adapters "default" (trained) and "old",
or holds all weights of both (``full``). Replicas (see ``transformers``), encoders, autoencoder and rewards are not
registered, so a checkpoint holds these weights only. ``optimizer_step`` also updates the old policy, so a checkpoint
never separates the two.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self

from solrl_lightning.artifacts.formatting import counted, duration
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import NonFiniteError, UserError
from solrl_lightning.frames import filmstrip
from solrl_lightning.names import MERGED, OLD, TRAINED
from solrl_lightning.objectives.base import Objective, check_loss
from solrl_lightning.policies.lora import State
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.chunks import Progress, check_finite, score_chunks, score_images
from solrl_lightning.rollout.records import Candidates, EncodedPrompts, TrainingBatch
from solrl_lightning.rollout.scoring_worker import worker_of
from solrl_lightning.rollout.stage import EXPLORE, Stage
from solrl_lightning.sampling import SolverState
from solrl_lightning.training.evaluation import Evaluation
from solrl_lightning.training.optimizer_state import ConfiguredSchedule, keep_configured
from solrl_lightning.training.samplers import Sampler
from solrl_lightning.training.shards import gather
from solrl_lightning.training.transformers import Transformers

log = logging.getLogger(__name__)

_LOWER_RATE = "Lower optimizer.lr, or correct the objective."
_COMPARE_KERNELS = (
    "The loss is finite and no step has changed the weights, so a kernel, compiled code or the objective is at fault. "
    "Run task=doctor, whose rows attention and gradients compare the first two, or set compile_training=false."
)


class SolRLModule(LightningModule):
    """Sol-RL on one model.

    Args:
        model: text encoders, transformer and autoencoder, loaded.
        transformers: the trained transformer, and what samples beside it.
        rewards: those with a weight score rollouts, all score evaluations.
        objective: the loss.
        optimizer: called with the trained parameters.
        rate_factor: factor of the learning rate after a number of iterations.
        old_decay: decay of the old policy after iteration 1, 2, ...
        evaluation: of the held-out prompts.
    """

    def __init__(
        self,
        model: PipelineAdapter,
        transformers: Transformers,
        rewards: WeightedRewards,
        objective: Objective,
        optimizer: partial[torch.optim.Optimizer],
        rate_factor: Callable[[float], float],
        old_decay: Callable[[int], float],
        evaluation: Evaluation,
    ) -> None:
        super().__init__()
        self.strict_loading = False  # a checkpoint holds the trained weights only, which on_load_checkpoint checks
        self.objective, self.optimizer_factory = objective, optimizer
        self.rate_factor, self.old_decay = rate_factor, old_decay
        self.evaluation = evaluation
        self.ema_state: State | None = None  # set by the EMA callback
        self.model_files: Mapping[str, str] = {}  # digests of those that base_digest lacks
        self.distances: dict[str, Tensor] = {}  # of the trained policy, before the old policy follows it
        self.transformer = transformers.trained.weights
        # DDP would broadcast the frozen weights, which every rank has read, and cannot broadcast those in 8 bits.
        tensors = chain(self.named_parameters(), self.named_buffers())
        self.model, self.transformers, self.rewards = model, transformers, rewards  # no nn.Modules: not registered
        frozen = [name for name, _ in tensors if not self._is_saved(name)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, frozen)
        self.scoring_worker = worker_of(model.device)

    def cpu(self) -> Self:
        """Return self, where it is: Lightning would move the weights to the CPU after ``validate``, and back."""
        return self

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch: micro-batches are on the device, and prompts have no tensors."""
        return batch

    # Rollouts

    def encode(self, prompts: list[Prompt]) -> EncodedPrompts:
        return EncodedPrompts(prompts, self.model.encode(prompts))

    def run_stage(
        self,
        stage: Stage,
        prompts: EncodedPrompts,
        seeds: Tensor,
        initial_state: SolverState | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Candidates:
        """Return the candidates of seeds [P, n], sampled from their noise or from ``initial_state``, and scored."""
        sampler, score = self.transformers.sampler(stage), self.scorer(stage)
        with closing(sampler.sample(stage, prompts, seeds, initial_state)) as chunks:
            scoring = self.rewards.for_training, score, progress, self.scoring_worker
            return score_chunks(chunks, prompts, seeds, *scoring, stage.with_states)

    def scorer(self, stage: Stage) -> Callable[..., Tensor]:
        """Return `score_images` as a stage decodes and scores, here and by explorers."""
        return partial(score_images, self.decoder(stage.decoder), nan_images=stage.name == EXPLORE)

    def decoder(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return what decodes latents for `Stage.decoder`."""
        model = self.model
        return {"full": model.decode, "bf16": model.decode_in_bf16, "preview": model.preview}[name]

    def requantize(self, version: int) -> None:
        """Give the old policy, that after ``version`` iterations, to everything that samples."""
        for _, sampler in self.transformers.named_samplers():
            sampler.sync(self.policy_state(OLD), version)

    @contextmanager
    def merged_with(self, weights: str) -> Iterator[Sampler]:
        """Yield the sampler of merged weights with the weights of ``policy_state``; restores the old policy."""
        sampler = self.transformers.samplers[MERGED]
        version = sampler.version
        try:
            sampler.sync(self.policy_state(weights), None)
            yield sampler
        finally:
            sampler.sync(self.policy_state(OLD), version)

    @torch.no_grad()
    def score(
        self,
        prompts: list[Prompt],
        seeds: Tensor,
        *,
        weights: str,
        steps: int,
        progress: Progress,
        decode: Callable[[Tensor], Tensor] | None = None,
    ) -> Candidates:
        """Return the candidates of seeds [P, n], sampled by the merged replica and scored by all rewards, or NaN.

        ``weights``: "base", "old", "default" (trained) or "ema". ``decode`` replaces ``model.decode``; it is called in
        the order of the candidates.
        """
        stage = Stage(sampler=MERGED, steps=steps, solver=self.evaluation.solver)
        encoded, score = self.encode(prompts), partial(score_images, decode or self.model.decode, nan_images=True)
        with self.merged_with(weights) as sampler, closing(sampler.sample(stage, encoded, seeds)) as chunks:
            return score_chunks(chunks, encoded, seeds, self.rewards, score, progress, self.scoring_worker)

    @torch.no_grad()
    def sample(
        self,
        prompts: list[Prompt],
        seeds: Tensor,
        *,
        weights: str,
        steps: int,
        shown: Callable[[Tensor], Tensor] = filmstrip,
    ) -> Tensor:
        """Return what is ``shown`` of decoded images, [P, n, 3, H, W] in [0, 1], on the CPU.

        ``weights`` as in ``score``.
        """
        stage = Stage(sampler=MERGED, steps=steps, solver=self.evaluation.solver)
        encoded = self.encode(prompts)
        with self.merged_with(weights) as sampler, closing(sampler.sample(stage, encoded, seeds)) as chunks:
            images = [shown(self.model.decode(chunk.state.x)).cpu() for chunk in chunks if chunk.state is not None]
        return torch.cat(images).unflatten(0, tuple(seeds.shape))

    def policy_state(self, name: str) -> State:
        """Return the weights "default" (trained), "old", "ema" (the average of "default"), or "base"."""
        if name == "ema":
            return self.policy_state(TRAINED) if self.ema_state is None else self.ema_state
        return self.transformers.trained.state(name)

    # Training

    def training_step(self, batch: TrainingBatch, batch_idx: int) -> Tensor:
        rows = max(1, batch.real)  # the objective sees no padding, but at least a row: its backward pass is collective
        others = {}
        for name, every in self.objective.needs.items():
            # Every n-th micro-batch, with an offset of one per iteration.
            if every > 1 and (batch_idx + self.trainer.fit_loop.iterations_done) % every:  # type: ignore[attr-defined]
                continue
            with torch.no_grad(), self.transformers.velocity_models[name]() as transformer:
                others[name] = self.velocity(transformer, batch)[:rows]
        with self.transformers.trained.current() as transformer:
            velocity, real = self.velocity(transformer, batch)[:rows], batch.first(rows)
        per_sample, metrics = check_loss(self.objective, self.objective(velocity, real, **others), rows)
        what = f"loss of objective={type(self.objective).__name__}"
        check_finite(per_sample.detach(), what, real.prompts, real.seeds)
        means = metrics | {"loss": per_sample.detach().mean()}
        values = {f"train/{name}": value for name, value in means.items()}
        size = batch.real * self.trainer.world_size  # whose mean over ranks Lightning makes an integer
        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True, batch_size=size)
        return (per_sample * real.weight).sum() / len(batch.weight)

    def velocity(self, transformer: nn.Module, batch: TrainingBatch) -> Tensor:
        return self.model.guided_velocity(transformer, batch.x_t, batch.sigma, batch.conditioning)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.trained_parameters() if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not norm.isfinite():  # equal on all ranks, which have reduced the gradients
            advice = _LOWER_RATE if self.trainer.global_step else _COMPARE_KERNELS
            raise NonFiniteError(f"train/grad_norm is {norm.item()}. {advice}")
        values = {"train/grad_norm": norm, "lr": optimizer.param_groups[0]["lr"]}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        loop: Any = self.trainer.fit_loop
        if loop.count_step():
            self.distances = self.transformers.trained.distances()
            if not self.distances["base_distance"].isfinite():
                raise NonFiniteError(f"the weights are not finite after an optimiser step. {_LOWER_RATE}")
            self.transformers.trained.update_old(self.old_decay(loop.iterations_done))

    def trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.optimizer_factory(self.trained_parameters())
        keep_configured(optimizer, self.optimizer_factory.keywords)
        loop: Any = self.trainer.fit_loop  # its count, as a branch may take other optimiser steps per iteration
        schedule = ConfiguredSchedule(optimizer, lambda _: self.rate_factor(loop.iterations_taken()))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # Evaluation

    def on_validation_start(self) -> None:
        """Say what an evaluation costs before the first one."""
        loop: Any = self.trainer.fit_loop
        evaluation = self.evaluation
        if not evaluation.history:
            message = "evaluation: %s x %s x %s, %.1f times the passes of an iteration"
            if evaluation.planned_seconds is not None:
                message += f", {duration(evaluation.planned_seconds)} by estimate"
            often = loop.evaluate_every < loop.max_epochs
            again = f"after {counted(loop.evaluate_every, 'iteration')}" if often else "at the end"
            sizes = (
                (len(evaluation.prompts), "held-out prompt"),
                (evaluation.images, "image"),
                (evaluation.steps, "step"),
            )
            log.info(f"{message}; again {again}", *(counted(*size) for size in sizes), loop.cost_of_evaluation)
            if (share := loop.large_share_of_evaluations) is not None:
                advice = "data.eval_prompts=<number> takes fewer held-out prompts"
                log.info("evaluations are %.0f %% of this run's passes; %s", 100 * share, advice)

    def validation_step(self, prompts: list[Prompt], batch_idx: int) -> None:
        """Score the evaluation average on this rank's held-out prompts."""
        loop: Any = self.trainer.fit_loop
        evaluation, stopwatch = self.evaluation, loop.stopwatch
        with stopwatch.stage("evaluate"):
            shape = len(evaluation.prompts), len(evaluation.columns)
            table = torch.zeros(shape, dtype=torch.float64, device=self.device)
            if prompts:
                progress = partial(evaluation.estimate, stopwatch.progress)
                score = partial(self.score, weights="ema", progress=progress)
                rows = evaluation.measure(prompts, score, self.model.decode)
                table[self.trainer.global_rank :: self.trainer.world_size] = rows.to(table)
            evaluation.table = self.trainer.strategy.reduce(table, reduce_op="sum").cpu()
        means = evaluation.means()
        scores = {f"eval/{name}": means[name] for name in evaluation.names}
        parts = {f"eval/{name}": means[f"eval/{name}"] for name in evaluation.rewards.part_names}
        self.log_dict(scores | parts, batch_size=1, logger=False)  # Lightning would log them at iteration - 1
        if not self.trainer.sanity_checking:
            metrics = evaluation.record(loop.iterations_done, loop.cost())
            for logger in self.loggers:
                logger.log_metrics(metrics, loop.iterations_done)

    def on_validation_epoch_end(self) -> None:
        loop: Any = self.trainer.fit_loop
        loop.termination.raise_on_all()

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = self._saved_tensors(checkpoint["state_dict"])
        checkpoint["evaluation"] = self.evaluation.digest_with_noise
        checkpoint |= self.evaluation.digests
        checkpoint["base_weights"] = self.model.base_digest
        checkpoint["weight_files"] = dict(self.model_files)
        checkpoint["lora_alpha"] = self.transformers.trained.alpha
        checkpoint["precision_backend"] = self.transformers.precision_backend  # a resumed run keeps the precision

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights, stored = (self._saved_tensors(state) for state in (self.state_dict(), checkpoint["state_dict"]))
        expected = {name: f"{torch.float32} {list(value.shape)}" for name, value in weights.items()}
        loaded = {name: f"{value.dtype} {list(value.shape)}" for name, value in stored.items()}
        if expected != loaded:
            name = min(name for name in expected | loaded if expected.get(name) != loaded.get(name))
            raise UserError(
                "the checkpoint's weights do not fit this model: model, model.train, model.lora.rank and "
                f"model.lora.target_modules must be as in the run that wrote it; {name} must be "
                f"{expected.get(name, 'absent')}, and is {loaded.get(name, 'absent')}. Repeat the options of that run, "
                "or take a checkpoint of one."
            )
        alpha = self.transformers.trained.alpha
        if (recorded := checkpoint.get("lora_alpha", alpha)) != alpha:
            raise UserError(
                f"model.lora.alpha={alpha:g} is invalid: the checkpoint's LoRA was trained with another, which scales "
                f"its update. Set model.lora.alpha={recorded:g}."
            )
        same = checkpoint.get("evaluation") == self.evaluation.digest_with_noise
        same &= all(checkpoint.get(name, value) == value for name, value in self.evaluation.digests.items())
        self.evaluation.comparable = same and not self.changed_files(checkpoint)
        if not self.evaluation.comparable:  # the best score and the count of Lightning's EarlyStopping are of others
            callbacks = checkpoint.get("callbacks", {})
            checkpoint["callbacks"] = {k: v for k, v in callbacks.items() if not k.startswith("EarlyStopping")}

    def changed_files(self, checkpoint: Mapping[str, Any]) -> list[str]:
        """Return which files the checkpoint was not trained with, or not as they are read; older ones do not say."""
        base, files = checkpoint.get("base_weights", self.model.base_digest), checkpoint.get("weight_files", {})
        changed = [name for name, digest in self.model_files.items() if files.get(name, digest) != digest]
        gone = files.keys() - self.model_files.keys()
        changed += sorted(name for name in gone if name.partition("/")[0] in self.model.optional)
        if base != self.model.base_digest:
            changed.insert(0, "model.pretrained with model.fused_lora and model.dtypes")
        return changed

    def _saved_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in state.items() if self._is_saved(name)}

    def _is_saved(self, name: str) -> bool:
        return self.transformers.trained.is_saved(name.removeprefix("transformer."))

    def save_policy(self, folder: Path, weights: str) -> None:
        """Write the weights "ema" or "default" in a format of diffusers: a LoRA, or a transformer.

        Rank 0 writes. Collective if the weights are sharded.
        """
        state = gather(self.policy_state(weights))
        if self.global_rank == 0:
            self.transformers.trained.save(self.model, folder, state)
