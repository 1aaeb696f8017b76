"""The LightningModule: the BF16 policy, its shadow, and the update.

Who owns what: ``transformer`` (a registered submodule) is the BF16 policy with its LoRA adapters "default" and "old".
Replicas share its frozen weights (see ``policies.replica``): ``merged`` (BF16) and ``shadow`` (quantised) hold the old
policy, ``base`` the model without adapters. They stand outside the module registry, as do the encoders, the
autoencoder and the rewards. So a checkpoint holds the two adapters only.

In training the reference velocity comes from ``base`` and the old one from the sampler that ``old_velocity`` names,
both without gradients.

The old policy moves inside ``optimizer_step``, so that no checkpoint can fall between the two.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.objectives.nft import NFTLoss
from solrl_lightning.optimizer_state import keep_configured
from solrl_lightning.policies import adapters, replica
from solrl_lightning.policies.adapters import OLD, TRAINED, State
from solrl_lightning.policies.compilation import compile_blocks
from solrl_lightning.quantization import Backend, QuantizationRule, convert, format_table
from solrl_lightning.quantization import plan as plan_quantization
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.rollout.seeds import evaluation_seeds
from solrl_lightning.rollout.stage import (
    Batching,
    Policy,
    Progress,
    Prompts,
    Trajectory,
    check_finite,
    run_stage,
    sample_states,
)
from solrl_lightning.rollout.training_rows import TrainingBatch
from solrl_lightning.sampling import SolverState
from solrl_lightning.stopwatch import Stopwatch

log = logging.getLogger(__name__)


class Stage(NamedTuple):
    """One pass over a pool: which transformer samples it and in how many solver steps."""

    name: str  # explore or regenerate: its stopwatch stage
    sampler: str  # policy (BF16, LoRA branches, eager), merged (BF16) or shadow (quantised)
    steps: int
    solver: str
    stop_after: int | None = None  # of these steps, then score the predicted image; the next stage goes on from there
    decoder: str = "full"  # or preview: what the scored images are decoded by
    only_ranks: bool = False  # a candidate that is not finite gets the reward NaN, and the run continues


class Sampling(NamedTuple):
    """How images are sampled."""

    solver: str  # in evaluations; a stage has its own
    batch: int
    compile: bool
    eval_steps: int
    eval_images: int


def _as_it_is(module: nn.Module) -> Callable[[], AbstractContextManager[nn.Module]]:
    return lambda: nullcontext(module)


def _silent(done: int, total: int) -> None:
    pass


class SolRLModule(LightningModule):
    """Sol-RL on one policy.

    Args:
        policy: the architecture with its loaded weights.
        rewards: score images; rollouts by those with a weight, evaluations by all.
        objective: the loss as a function of velocities, x0, x_t, sigma and advantage.
        optimizer: called with the trained parameters.
        old_decay: decay of the old policy after optimiser step 1, 2, ...
        old_velocity: the sampler whose velocity is the old policy's in training: policy (as published) or merged.
        stages: the family's passes over the pool.
        sampling: solver, batch size, compilation, and the evaluation's size.
        lora: rank, alpha and target modules of the adapters.
        backend, rule: arithmetic of the shadow and which layers it covers; used when a stage samples from the shadow.
        kl_needs_reference: whether the objective reads the base model's velocity (its KL weight is not 0).
        eval_prompts: held-out prompts.
        seed: of adapters and evaluation noise.
    """

    # Set past nn.Module's registry: see the module docstring.
    policy: Policy
    rewards: WeightedRewards
    base: nn.Module
    replicas: dict[str, nn.Module]
    lora_layers: dict[str, LoraLayer]

    def __init__(
        self,
        policy: Policy,
        rewards: WeightedRewards,
        objective: Callable[..., NFTLoss],
        optimizer: Callable[..., torch.optim.Optimizer],
        old_decay: Callable[[int], float],
        old_velocity: str,
        stages: list[Stage],
        sampling: Sampling,
        lora: LoraConfig,
        backend: Backend,
        rule: QuantizationRule,
        kl_needs_reference: bool,
        eval_prompts: list[str],
        seed: int,
    ) -> None:
        super().__init__()
        self.strict_loading = False  # a checkpoint holds the adapters only; on_load_checkpoint checks that it holds all
        self.stages, self.sampling, self.objective, self.seed = stages, sampling, objective, seed
        self.optimizer_factory, self.old_decay, self.lora = optimizer, old_decay, lora
        self.old_velocity = old_velocity
        self.kl_needs_reference = kl_needs_reference
        self.eval_prompts = eval_prompts
        self.eval_history: list[dict[str, Any]] = []  # one row per evaluation
        self.ema_state: State | None = None  # set by the EMA callback
        self.transformer = policy.transformer.train()  # none of these models has dropout
        base = replica.share(self.transformer).eval()
        merged = replica.share(self.transformer).eval()
        shadow = replica.share(self.transformer).eval() if any(stage.sampler == "shadow" for stage in stages) else None
        self.layer_table = ""  # of the shadow
        self.overlap = policy.device.type == "cuda"  # score a chunk while the next one is sampled
        self.backend = backend
        self.precision_backend = f"{backend.precision} ({backend.name})" if shadow is not None else "no shadow"
        if shadow is not None:
            plans = plan_quantization(shadow, rule, backend)
            log.info("%s", backend.line)
            self.layer_table = format_table(plans)
            convert(shadow, plans, backend)
        layers = adapters.add_adapters(self.transformer, lora, seed)
        if policy.device.type == "cuda":  # as under the published code's autocast
            adapters.multiply_in_input_dtype(layers)
        replicas: dict[str, Any] = {"merged": merged} | ({"shadow": shadow} if shadow is not None else {})
        for module in replicas.values():
            replica.own_weights(module, layers)
        if sampling.compile:
            for module in (base, *replicas.values()):
                compile_blocks(module, fullgraph=module is not shadow or backend.fullgraph)
        unregistered = {"policy": policy, "rewards": rewards, "base": base, "replicas": replicas, "lora_layers": layers}
        for name, value in unregistered.items():
            object.__setattr__(self, name, value)
        self.transformer_of: dict[str, Callable[[], AbstractContextManager[nn.Module]]] = {
            "policy": partial(adapters.using, self.transformer, layers, OLD),
            **{name: _as_it_is(module) for name, module in replicas.items()},
        }
        self.batching = {
            name: Batching(sampling.batch, fixed=sampling.compile and name != "policy") for name in self.transformer_of
        }

    # Rollouts

    def refresh_shadow(self) -> None:
        """Writes the old policy into the replicas: merged in float32, then rounded or re-quantised in place."""
        self._refresh(adapters.adapter_state(self.lora_layers, OLD), self.replicas.values())

    def encode(self, texts: list[str]) -> Prompts:
        return Prompts(texts, self.policy.encode(texts))

    def run_stage(
        self,
        stage: Stage,
        prompts: Prompts,
        seeds: Tensor,
        progress: Progress = _silent,
        begin: SolverState | None = None,
    ) -> Candidates:
        """Samples and scores seeds [P, n] with the stage's transformer; see ``rollout.stage``."""
        trajectory = Trajectory(self.policy.sigmas(stage.steps), stage.solver, begin, stage.stop_after)
        rest = (self.batching[stage.sampler], self.rewards.trained, prompts, seeds, trajectory, progress)
        decode = {"full": self.policy.decode, "preview": self.policy.preview}[stage.decoder]
        with self.transformer_of[stage.sampler]() as transformer:
            return run_stage(
                self.policy, transformer, *rest, overlap=self.overlap, decode=decode, only_ranks=stage.only_ranks
            )

    @torch.no_grad()
    def sample(self, prompts: list[str], seeds: Tensor, *, weights: str, steps: int) -> Tensor:
        """[P, n, 3, H, W] images in [0, 1] on the CPU, of weights "base", "old", "default" or "ema"."""
        encoded, trajectory = self.encode(prompts), Trajectory(self.policy.sigmas(steps), self.sampling.solver)
        images, batching = [], self.batching["merged"]
        with self.merged_with(self.adapter_state(weights)) as transformer:
            for _, state in sample_states(self.policy, transformer, batching, encoded, seeds, trajectory):
                images.append(self.policy.decode(state.x).cpu())
        return torch.cat(images).unflatten(0, tuple(seeds.shape))

    @torch.no_grad()
    def score(self, prompts: list[str], seeds: Tensor, *, weights: str, steps: int, progress: Progress) -> Candidates:
        """As ``sample``, but scored, by the rewards that are only evaluated, too."""
        trajectory = Trajectory(self.policy.sigmas(steps), self.sampling.solver)
        rest = (self.batching["merged"], self.rewards, self.encode(prompts), seeds, trajectory, progress)
        with self.merged_with(self.adapter_state(weights)) as transformer:
            return run_stage(self.policy, transformer, *rest, overlap=self.overlap)

    def adapter_state(self, name: str) -> State:
        """Adapter "default" or "old", their average "ema", or "base": no adapter at all."""
        if name == "base":
            return {key: torch.zeros_like(value) for key, value in self.adapter_state(TRAINED).items()}
        if name == "ema":
            return self.adapter_state(TRAINED) if self.ema_state is None else self.ema_state
        return adapters.adapter_state(self.lora_layers, name)

    @contextmanager
    def merged_with(self, state: State) -> Iterator[nn.Module]:
        """The merged replica with other weights; those of the old policy are back afterwards."""
        merged = self.replicas["merged"]
        self._refresh(state, [merged])
        try:
            yield merged
        finally:
            self._refresh(adapters.adapter_state(self.lora_layers, OLD), [merged])

    @torch.no_grad()
    def _refresh(self, state: State, modules: Any) -> None:
        for name, weight in adapters.merged_weights(self.lora_layers, state):
            for module in modules:
                replica.refresh(module, [(name, weight)])

    # Training

    def training_step(self, batch: TrainingBatch, batch_idx: int) -> Tensor:
        with torch.no_grad(), self.transformer_of[self.old_velocity]() as transformer:
            old = self._velocity(transformer, batch)
            reference = self._velocity(self.base, batch) if self.kl_needs_reference else None
        velocity = self._velocity(self.transformer, batch)
        terms = self.objective(velocity, old, reference, batch.x0, batch.x_t, batch.sigma, batch.advantage)
        check_finite(terms.rows.detach(), "loss", batch.prompts, batch.seeds)
        loss = (terms.rows * batch.weight).mean()
        values = {"train/loss": loss.detach(), "train/kl": terms.kl}
        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return loss

    def _velocity(self, transformer: nn.Module, batch: TrainingBatch) -> Tensor:
        return self.policy.velocity(transformer, batch.x_t, batch.sigma, batch.conditioning)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.trained_parameters() if p.grad is not None])
        self.log("train/grad_norm", norm, on_step=False, on_epoch=True, batch_size=1)  # equal on all ranks by now

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        done = self.trainer.global_step + 1  # Lightning counts the step after this hook
        adapters.move_old(self.lora_layers, self.old_decay(done))

    def trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return keep_configured(self.optimizer_factory(self.trained_parameters()))

    # Evaluation

    def validation_step(self, prompts: list[str], batch_idx: int) -> None:
        """Scores the evaluation average on this rank's held-out prompts, with the same noise every time."""
        stopwatch: Stopwatch = self.trainer.fit_loop.stopwatch  # type: ignore[attr-defined]
        with stopwatch.stage("evaluate"):
            names = self.evaluated
            total = torch.zeros(1 + len(names), dtype=torch.float64, device=self.device)  # images, sum of each score
            if prompts:
                seeds = evaluation_seeds(self.seed, prompts, self.sampling.eval_images)
                steps = self.sampling.eval_steps
                scored = self.score(prompts, seeds, weights="ema", steps=steps, progress=stopwatch.progress)
                scores = self.evaluated_scores(scored).to(self.device, torch.float64).flatten(0, 1)
                total = torch.cat([torch.full_like(scores[:1, 0], len(scores)), scores.sum(0)])
            total = self.trainer.strategy.reduce(total, reduce_op="sum")
        means = dict(zip(names, (total[1:] / total[0]).tolist(), strict=True))
        for name, mean in means.items():
            self.log(f"eval/{name}", mean, batch_size=1, logger=False)  # Lightning would put it one step too early
        if not self.trainer.sanity_checking:
            self.eval_history.append({"iteration": self.trainer.global_step, **means})
            for logger in self.loggers:
                logger.log_metrics({f"eval/{name}": mean for name, mean in means.items()}, self.trainer.global_step)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.received_sigterm:  # which fit would forget that comes after the first evaluation
            raise SIGTERMException

    @property
    def evaluated(self) -> list[str]:
        """The names of what evaluations report: every reward and, of several, their weighted sum."""
        return list(dict.fromkeys([*self.rewards.rewards, self.rewards.name]))

    def evaluated_scores(self, scored: Candidates) -> Tensor:
        """[P, n, len(evaluated)]."""
        several = len(self.evaluated) > scored.scores.shape[-1]
        return torch.cat([scored.scores, scored.rewards[..., None]], dim=-1) if several else scored.scores

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = self._adapter_tensors(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own, found = (self._shapes(state) for state in (self.state_dict(), checkpoint["state_dict"]))
        if own != found:
            name = min(name for name in own | found if own.get(name) != found.get(name))
            raise UserError(
                "the checkpoint's adapters do not fit this model: a run goes on, and is read, with the same model and "
                f"LoRA (rank, target modules); {name} has {own.get(name, 'no place')} in the model and "
                f"{found.get(name, 'no values')} in the checkpoint. Use the options of the run that wrote it."
            )

    def _shapes(self, state: dict[str, Tensor]) -> dict[str, list[int]]:
        return {name: list(value.shape) for name, value in self._adapter_tensors(state).items()}

    def _adapter_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in state.items() if ".lora_" in name}

    def save_lora(self, folder: Path, weights: str) -> None:
        """Writes "ema" or "default" so that plain diffusers loads it with ``pipe.load_lora_weights(folder)``."""
        state = {name: value.detach().cpu().contiguous() for name, value in self.adapter_state(weights).items()}
        self.policy.save_lora(folder, state, self.lora)
