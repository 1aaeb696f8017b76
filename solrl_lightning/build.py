"""Build the objects of a run from its options. The classes that they are of take arguments, never the options."""

import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.utils import logging as diffusers_logging
from huggingface_hub import utils as hub_utils
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.loggers import Logger
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Checkpoint,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from omegaconf import OmegaConf
from peft import LoraConfig
from transformers.utils import logging as transformers_logging

from solrl_lightning.artifacts.complete import reading
from solrl_lightning.artifacts.files import WholeCheckpointIO, read_checkpoint
from solrl_lightning.artifacts.loggers import Tracker, keep_earlier_file
from solrl_lightning.callbacks.ema import average_in
from solrl_lightning.callbacks.history import MetricHistory
from solrl_lightning.callbacks.summary import RunSummary
from solrl_lightning.cli.config import ConfigTree, as_written, own_sources
from solrl_lightning.cli.launch import advice, check_world, is_first, renew_store
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.data.prompts import PromptSchedule, PromptSets, digest
from solrl_lightning.errors import UserError
from solrl_lightning.machine import attention
from solrl_lightning.machine.threads import divide_threads
from solrl_lightning.names import AUTO, SHADOW, TRAINED, Storage, is_packaged
from solrl_lightning.objectives.base import Objective
from solrl_lightning.options.model import Model, Quantization
from solrl_lightning.options.reward import Reward
from solrl_lightning.options.run import Run
from solrl_lightning.options.trainer import Trainer as TrainerNode
from solrl_lightning.options.trainer import named_devices
from solrl_lightning.policies.compilation import should_compile
from solrl_lightning.policies.config_files import config_folder
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.tensor_digest import file_digests
from solrl_lightning.quantization import QuantizationRule, resolve_from
from solrl_lightning.rewards.base import Reward as Scorer
from solrl_lightning.rewards.weighted import COMBINATIONS, WeightedRewards
from solrl_lightning.rollout.scoring_worker import worker_of
from solrl_lightning.run_prompts import prompt_sets
from solrl_lightning.targets import locate, make, make_optimizer
from solrl_lightning.training.evaluation import Evaluation
from solrl_lightning.training.loop import ExploreTrainLoop
from solrl_lightning.training.micro_batches import try_out
from solrl_lightning.training.module import SolRLModule
from solrl_lightning.training.transformers import AdaptedTransformer, TrainedTransformer, Transformers, replicate

log = logging.getLogger(__name__)

NO_REWARDS = WeightedRewards({}, {})


def device_of(node: TrainerNode) -> torch.device:
    """Return where a task without training runs: the first device that the trainer would use."""
    devices = named_devices(node)[:1] or 1
    options = dict(logger=False, devices=devices, num_nodes=1, strategy="auto", enable_checkpointing=False)
    return instantiate_trainer(node, **options).strategy.root_device


def instantiate_trainer(node: TrainerNode, **options: Any) -> Trainer:
    """Instantiate the trainer.

    Raises ``UserError`` for devices that this machine does not have, for another arithmetic or strategy, and where a
    launcher has started other processes than the trainer's ranks.
    """
    if node.get("benchmark") is None:  # cuDNN would choose by time
        options["benchmark"] = not node.get("deterministic")
    try:
        trainer: Trainer = make("trainer", node, **options)
    except UserError as error:
        cause = error.__cause__
        if not isinstance(cause, MisconfigurationException | RuntimeError):
            raise
        reason = " ".join(str(cause).split()).rstrip(".")
        is_auto = node.get("accelerator") == node.get("devices") == "auto"
        fix = advice().strip() or ("trainer=cpu takes the CPU." if is_auto else "trainer=auto takes what there is.")
        if "MPI library" in reason:  # mpi4py's error
            fix = "Install an MPI, as with apt install libopenmpi-dev, or run pip uninstall mpi4py."
        raise UserError(f"trainer cannot run here: {reason}. {fix}") from error
    if trainer.precision != "32-true":  # by trainer.plugins
        raise UserError(
            f"trainer.plugins={node.get('plugins')} is invalid: every dtype is set in the code and Lightning "
            f"casts nothing, but this one is for {trainer.precision}. Leave it out."
        )
    if not isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
        raise UserError(
            f"trainer.strategy={node.get('strategy')} is invalid: every rank holds the whole policy, so it must "
            "be a DDPStrategy or a SingleDeviceStrategy. Use trainer.strategy=ddp."
        )
    if isinstance(trainer.strategy, DDPStrategy):  # otherwise its buckets are a second copy of the gradients
        trainer.strategy._ddp_kwargs.setdefault("gradient_as_bucket_view", True)
    environment = getattr(trainer.strategy, "cluster_environment", None)
    is_launched = environment is not None and environment.creates_processes_externally
    check_world(trainer.num_nodes, trainer.num_devices, trainer.global_rank, is_launched)
    if not is_launched:
        divide_threads(trainer.num_devices)
    return trainer


def with_option(cfg: Run, group: str, option: str, configured: bool = False, **values: Any) -> Run:
    """Return a copy of the options with another option of a group, of the package or of the run's --config-dir.

    ``configured``: with the values below the group that the command line and its experiment set. ``values`` replace
    values of its keys.

    Raises:
        UserError: there is no such option, or it lacks a key that is set.
    """
    tree, overrides = OmegaConf.create(cfg.tree()), []
    with ConfigTree() as configs:
        if HydraConfig.initialized():  # in a job
            job: Any = HydraConfig.get()
            configs.look_in(own_sources(job))
            overrides = as_written(job.overrides.task) if configured else []
        kept = [each for each in overrides if each.lstrip("+~").startswith((f"{group}.", "experiment="))]
        tree[group] = OmegaConf.to_container(configs.compose([*kept, f"{group}={option}"])[group], resolve=False)
    tree[group].update(values)
    OmegaConf.resolve(tree)
    return cfg.with_group(group, OmegaConf.to_container(tree[group]))


def load_trained(module: SolRLModule, ckpt: str | Path) -> dict[str, Any]:
    """Read the trained weights and their evaluation average from a checkpoint of a training run, and return it."""
    checkpoint = read_checkpoint(ckpt, module.model.device)
    module.on_load_checkpoint(checkpoint)
    if changed := module.changed_files(checkpoint):
        log.warning("%s: this is not what %s was trained with", ", ".join(changed), ckpt)
    module.load_state_dict(checkpoint["state_dict"], strict=False)
    module.ema_state = average_in(checkpoint, module.policy_state(TRAINED))
    return checkpoint


def load_weights(module: SolRLModule, cfg: Run) -> None:
    """Read what ``cfg`` begins with: its checkpoint, or else its LoRA ``model.init_lora``, if there is one."""
    if cfg.ckpt is not None:
        load_trained(module, cfg.ckpt)
    elif cfg.model.init_lora is not None:
        trained = module.transformers.trained
        assert isinstance(trained, AdaptedTransformer)  # Run.check_full
        trained.start_from(Path(cfg.model.init_lora).expanduser(), module.model.pipeline_class)


def build_trainer(node: TrainerNode, callback_nodes: Mapping[str, Any], logger_nodes: Mapping[str, Any]) -> Trainer:
    """Return the trainer with the chosen callbacks and loggers."""
    renew_store()
    callbacks_by_name = _made_each("callbacks", callback_nodes, Callback)
    _check_callbacks(callbacks_by_name)
    callbacks = [*callbacks_by_name.values()]
    # MetricHistory and RunSummary write the metrics and results of custom callbacks, so they come last.
    callbacks.sort(key=lambda callback: isinstance(callback, MetricHistory | RunSummary))
    # Only rank 0 logs, and it alone may make a logger: several would make MLflow's database at once.
    made = _made_each("logger", logger_nodes, Logger) if is_first() else dict.fromkeys(logger_nodes, DummyLogger())
    loggers = [Tracker(name, logger) for name, logger in made.items()]
    for tracker in loggers:
        tracker.attempt(partial(keep_earlier_file, tracker.logger), None)
    # Lightning adds its own ModelCheckpoint, in the logger's folder, and its own bar where there is none.
    kinds = {"enable_checkpointing": Checkpoint, "enable_progress_bar": ProgressBar}
    has = {name: any(isinstance(callback, kind) for callback in callbacks) for name, kind in kinds.items()}
    trainer = instantiate_trainer(node, logger=loggers or False, callbacks=callbacks, **has)
    trainer.strategy.checkpoint_io = WholeCheckpointIO()
    return trainer


_REFUSED: dict[tuple[type[Callback], ...], str] = {
    (GradientAccumulationScheduler,): "an optimiser step takes all its micro-batches, whose number follows from "
    "model.micro_batch",
    (StochasticWeightAveraging, WeightAveraging): "it changes the weights that a checkpoint holds, and such a run "
    "cannot resume; callbacks.ema averages the trained weights",
    (BatchSizeFinder, LearningRateFinder): "it needs batches before the first iteration, which makes them",
    (BaseFinetuning,): "it chooses which parts of a module are trained, which model.train and model.lora do",
    (Timer,): "max_seconds=<seconds> limits a run, also one that resumes, and time/* has the seconds of its stages",
    (ModelPruning,): "it renames the weights that a checkpoint and lora/ hold",
}
"""Callbacks of Lightning that an iteration cannot have, and the reason."""


def _check_callbacks(callbacks: Mapping[str, Callback]) -> None:
    """Raise ``UserError`` for one that changes what is trained or saved, and for a second progress bar."""
    bars = [name for name, callback in callbacks.items() if isinstance(callback, ProgressBar)]
    for name, callback in callbacks.items():
        rule = next((rule for kinds, rule in _REFUSED.items() if isinstance(callback, kinds)), "")
        if name in bars[1:]:
            rule = f"Lightning takes one progress bar, callbacks.{bars[0]}, unless ~callbacks.{bars[0]} leaves that out"
        if rule:
            raise UserError(f"callbacks.{name} is invalid: {rule}. Leave it out with ~callbacks.{name}.")


def _made_each(group: str, nodes: Mapping[str, Any], kind: type) -> dict[str, Any]:
    return {name: make(f"{group}.{name!s}", node, kind=kind) for name, node in nodes.items() if node is not None}


def build_objective(node: Mapping[str, Any]) -> Objective:
    objective: Objective = make("objective", node, kind=Objective)
    return objective


def build_rewards(reward: Reward, frames: str | int | None, device: torch.device) -> WeightedRewards:
    """Load every reward of the options, once per process."""
    hide_loading_bars()
    members = reward.members
    if reward.pretrained is not None:
        (only,) = members.values()  # Reward.check raises for several
        only["pretrained"] = reward.pretrained
    weights = {name: member.pop("weight") for name, member in members.items()}
    loaded = {
        name: make(f"reward.{name}", m, takes="`device`", device=str(device), kind=Scorer)
        for name, m in members.items()
    }
    for name, each in loaded.items():
        vars(each)["name"] = name  # as errors name it, unless its class has a property of that name
    return WeightedRewards(loaded, weights, COMBINATIONS[reward.combine], frames)


def build_tried_rewards(reward: Reward, model: Model, prompts: PromptSets, device: torch.device) -> WeightedRewards:
    """Load the rewards, check the prompts by them, and try them on a grey image.

    Raises:
        UserError: a reward cannot score the prompts or an image.
    """
    prepare_device(device)
    rewards = build_rewards(reward, model.frames, device)
    for note in prompts.notes:
        log.info("%s", note)
    rewards.check_prompts([*prompts.train, *prompts.eval])
    grey = torch.full((3, model.resolution, model.resolution), 0.5, device=device)
    with worker_of(device)() as submit:  # in the thread that will score
        submit(partial(rewards.try_out, grey, [*prompts.train, *prompts.eval][0])).result()
    return rewards


def hide_loading_bars() -> None:
    """Hide the bars for reading files of this machine, and keep the bars of downloads."""
    downloads = not hub_utils.are_progress_bars_disabled()
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()  # of the hub's downloads, too
    if downloads:
        hub_utils.enable_progress_bars()


def prepare_device(device: torch.device) -> None:
    """Set what CUDA keeps per process, before the first tensor of a model is made; a CPU needs nothing.

    1. The current device. Transformer Engine quantises onto it wherever its layer is (its issue 3124), and Lightning
       sets it only when a run starts.
    2. The kernels of attention.
    3. TF32 for the products that stay in float32: rewards, autoencoder, merged weights.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        attention.prepare(device)
        torch.set_float32_matmul_precision("high")


def build_with_weights(cfg: Run, device: torch.device, samplers: Collection[str]) -> SolRLModule:
    """Build the module of a task that scores: with rewards, held-out prompts, and the weights that ``cfg`` names."""
    prompts = prompt_sets(cfg)
    rewards = build_tried_rewards(cfg.reward, cfg.model, prompts, device)
    module = build_model(cfg, device, samplers, rewards, prompts.eval[: cfg.data.eval_prompts])
    load_weights(module, cfg)
    return module


def build_training(cfg: Run, prompts: PromptSets, trainer: Trainer) -> tuple[SolRLModule, ExploreTrainLoop]:
    """Build the module and the loop of a run.

    Raises:
        UserError: a part is invalid; a reward or a prompt before the model is loaded, an objective before it samples.
    """
    if cfg.prompts_per_iteration < trainer.world_size:
        raise UserError(
            f"prompts_per_iteration={cfg.prompts_per_iteration} is invalid: every device needs at least one prompt; "
            f"there are {trainer.world_size} devices. Use prompts_per_iteration={trainer.world_size}, or lower "
            "trainer.devices."
        )
    device, objective = trainer.strategy.root_device, build_objective(cfg.objective)
    rewards = build_tried_rewards(cfg.reward, cfg.model, prompts, device)
    if cfg.model.gradient_checkpointing == AUTO:  # by the memory beside the rewards
        from solrl_lightning.sizing.plan import settle_checkpointing

        cfg = settle_checkpointing(cfg, device, trainer.world_size)
    module = build_model(cfg, device, cfg.samplers, rewards, prompts.eval[: cfg.data.eval_prompts], objective)
    if not is_packaged(type(objective).__module__):
        prompt, noise = module.encode(prompts.train[:1]), module.model.noise(torch.zeros(1, dtype=torch.int64))
        try_out(objective, prompt, noise[0], module.model.sigmas(cfg.family.regenerate.steps))
    loop = ExploreTrainLoop(
        trainer,
        schedule=PromptSchedule(prompts.train, cfg.prompts_per_iteration, cfg.seed),
        stages=cfg.family.stages(module.model.sigmas, objective.solver, objective.shared_noise),
        pool=cfg.family.pool,
        objective=objective,
        micro_batch=cfg.model.micro_batch,
        optimizer_steps=cfg.optimizer_steps,
        seed=cfg.seed,
        evaluate_every=cfg.evaluation.every,
        max_seconds=cfg.max_seconds,
    )
    return module, loop


def build_model(
    cfg: Run,
    device: torch.device,
    samplers: Collection[str] = (),
    rewards: WeightedRewards = NO_REWARDS,
    eval_prompts: Sequence[Prompt] = (),
    objective: Objective | None = None,
) -> SolRLModule:
    """Build the module of a run; without rewards it can only make pictures.

    ``samplers``: names of those that rollouts use. ``objective``: None builds the objective of ``cfg``.
    """
    prepare_device(device)
    model = build_policy(_with_embeddings(cfg.model), device, cfg.base_weights, cfg.encode_on, cfg.is_sharded)
    compiled = {}
    wishes = {"family.compile": cfg.family.compile, "compile_training": cfg.compile_training}
    for (key, choice), what in zip(wishes.items(), ("rollouts", "training steps"), strict=True):
        if choice == "auto" and (cfg.base_weights != "bfloat16" or cfg.is_sharded):
            choice = False
        compiled[key], why = should_compile(key, what, choice, device)
        if samplers or compiled[key]:
            log.info("%s", why)
    if cfg.family.warning:
        log.warning("%s", cfg.family.warning)
    if cfg.is_sharded:
        from solrl_lightning.training.sharding import shard_transformers

        transformers = shard_transformers(model, trained_as(cfg.model, cfg.seed, True), cfg.model.rollout_batch)
    else:
        transformers = build_transformers(
            cfg.model,
            cfg.seed,
            model,
            compile_replicas=compiled["family.compile"],
            compile_policy=compiled["compile_training"],
            with_shadow=SHADOW in samplers,
            backend=resolve_from(cfg.ckpt, cfg.precision.name, cfg.precision.backend, device),
        )
    module = SolRLModule(
        model,
        transformers,
        rewards,
        objective=objective or build_objective(cfg.objective),
        optimizer=make_optimizer(cfg.optimizer),
        rate_factor=make("scheduler", cfg.scheduler),
        old_decay=make("old_policy", cfg.old_policy),
        evaluation=Evaluation(
            list(eval_prompts),
            rewards,
            cfg.model.solver,
            cfg.model.eval_steps,
            cfg.data.eval_images,
            cfg.seed,
            model.sampling_settings(cfg.model.eval_steps) | cfg.model.custom,
            cfg.reward.scoring,
        ),
    )
    module.model_files = file_digests(model.files)
    return module


def _with_embeddings(model: Model) -> Mapping[str, Any]:
    """Return ``model.policy``; a custom class has a folder of embeddings for its file and its arguments."""
    node: dict[str, Any] = {**model.policy}
    if model.custom and node.get("embeddings"):
        file = Path(getattr(sys.modules[locate("model.policy", node).__module__], "__file__", None) or "")
        code = file.read_bytes() if file.is_file() else b""  # a notebook has none, nor has an archive
        node["embeddings"] = str(Path(node["embeddings"]) / digest(model.custom, code.hex()))
    return node


def build_policy(
    node: Mapping[str, Any], device: torch.device, base_weights: Storage, encode_on: str, is_sharded: bool
) -> PipelineAdapter:
    """Load the text encoders, the transformer and the autoencoder."""
    hide_loading_bars()
    options: dict[str, Any] = dict(device=str(device), base_weights=base_weights, encode_on=encode_on)
    if is_sharded:
        options["transformer_device"] = "cpu"
    if is_packaged(node["_target_"]) and config_folder(node["pretrained"]) is not None:
        policy_on_meta(node)
    policy: PipelineAdapter = make("model.policy", node, takes=", ".join(f"`{name}`" for name in options), **options)
    return policy


def policy_on_meta(node: Mapping[str, Any]) -> PipelineAdapter:
    """Make the policy with shapes only, by its config files.

    Raises:
        UserError: a config file is damaged, or the pipeline's parts do not fit together.
        Exception: of a custom class, whose author needs its traceback.
    """
    folder = f"model.pretrained={node['pretrained']}"
    sizes = f"model.resolution={node['resolution']} and model.max_sequence_length={node['max_sequence_length']}"
    with reading(f"{folder} is invalid", node["_target_"]):
        policy: PipelineAdapter = make("model.policy", node, weights="random", embeddings=None, device="meta")
    fix = "Download or save it again, whole, or set smaller sizes."
    with reading(f"{folder} with {sizes} is invalid", node["_target_"], fix):
        policy.try_out()
    return policy


def build_transformers(options: Model, seed: int, model: PipelineAdapter, **how: Any) -> Transformers:
    """Return the transformers of a device that holds the whole model; ``how`` as in ``replicate``."""
    trained, rule = trained_as(options, seed, is_sharded=False), quantization_rule(options.quantization)
    return replicate(model, trained, options.rollout_batch, rule=rule, **how)


def trained_as(model: Model, seed: int, is_sharded: bool) -> Callable[[ModelMixin], TrainedTransformer]:
    """Return the function that makes the trained transformer of the loaded one."""
    if model.train == "full" and is_sharded:
        from solrl_lightning.training.sharded_full import ShardedFullTransformer

        return ShardedFullTransformer
    if model.train == "full":
        from solrl_lightning.training.full import FullTransformer

        return FullTransformer
    lora, targets = model.lora, list(model.lora.target_modules)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, init_lora_weights="gaussian")
    return partial(AdaptedTransformer, config=config, seed=seed)


def quantization_rule(quantization: Quantization) -> QuantizationRule:
    return QuantizationRule(list(quantization.include), dict(quantization.exclude))
