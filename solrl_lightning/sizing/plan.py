"""Layers and bytes of a run at its model's real size, and the options with which it fits a card.

The model is built on the device ``meta``, where tensors have shapes but no numbers, and is called as in a run.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch

from solrl_lightning.artifacts.files import CHECKPOINT_BYTES
from solrl_lightning.build import build_objective, policy_on_meta, quantization_rule, trained_as, with_option
from solrl_lightning.machine.memory import total_memory
from solrl_lightning.names import SHADOW, TRAINED
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Plan as PlanOptions
from solrl_lightning.policies.architectures import Architecture, find_architecture
from solrl_lightning.policies.base_weights import block_linears
from solrl_lightning.policies.checkpointing import blocks_of
from solrl_lightning.policies.config_files import config_folder
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.quantization import Backend, LayerPlan, resolve_from
from solrl_lightning.quantization import plan as plan_layers
from solrl_lightning.quantization.backends import PACKED_BITS, Hardware, hardware_of
from solrl_lightning.quantization.first_run import first_run
from solrl_lightning.rollout.stage import Sigmas
from solrl_lightning.sizing.footprint import (
    OPTIONS,
    RECOMPUTED,
    RESERVE,
    Footprint,
    Latents,
    Options,
    bytes_of,
    encoder_bytes,
    fit,
    gathered_bytes,
    latent_bytes,
    overrides,
    replica_bytes,
    separate_bytes,
    stored_bytes,
)
from solrl_lightning.sizing.trace import Passes, trace

log = logging.getLogger(__name__)
Json = dict[str, Any]
_ALLOCATOR = 2e9  # bytes of CUDA and of the allocator's cache


class Plan(NamedTuple):
    """A run's model, and its memory on one device."""

    model: PipelineAdapter  # on ``meta``, its transformer as it is trained
    architecture: Architecture
    layers: Sequence[LayerPlan]
    passes: Passes
    parameters: int
    bytes: dict[str, int]
    checkpoint_bytes: int  # on disk
    footprint: Footprint  # with the shadow as it is held here
    options: Options  # as configured
    here: Options  # as they are on this device
    shadows: Mapping[Backend, int]  # bytes by backend


class Card(NamedTuple):
    """A GPU that a run may fit."""

    hardware: Hardware
    memory: float  # 10^9 bytes


def plan_run(
    cfg: Run, backend: Backend, devices: int = 1, others: Iterable[Backend] = (), room: float = math.inf
) -> Plan:
    """Build the run's model on ``meta`` with its bytes on one of ``devices``.

    ``others``: further backends of the shadow to compute the bytes of. ``room``: bytes of a device for it, by which
    ``model.gradient_checkpointing=auto`` is chosen.
    """
    model = policy_on_meta(cfg.model.policy)
    architecture = find_architecture(model.pretrained, model.pipeline_class)
    rule = quantization_rule(cfg.model.quantization)
    plans = {each: plan_layers(model.transformer, rule, each) for each in (backend, *others)}
    layers = plans[backend]
    weights = dict(model.transformer.named_parameters())
    blocks = blocks_of(model.transformer)
    gathered = gathered_bytes(model.transformer, blocks, cfg.model.train == "full") if cfg.is_sharded else 0
    stored = stored_bytes(bytes_of(model.transformer), block_linears(model.transformer).values())
    passes, trained = trace(model, trained_as(cfg.model, cfg.seed, cfg.is_sharded))
    trained_weights = sum(weight.numel() for weight in trained.state(TRAINED).values())
    average = 4 * trained_weights
    averaged = bool(cfg.callbacks_of("ema.WeightEMA"))
    beside = separate_bytes((trained.transformer, trained.weights), weights.values())
    replaced = trained.replaced
    rounded = 0 if trained.weights is trained.transformer else stored["bfloat16"]
    quantized = {
        each: [f"{layer.name}.weight" for layer in layers if layer.quantized] for each, layers in plans.items()
    }
    packed = replica_bytes(weights, replaced, quantized[backend], PACKED_BITS[backend.precision])
    shadows = {
        each: replica_bytes(weights, replaced, names, each.bits_per_weight) if SHADOW in cfg.samplers else 0
        for each, names in quantized.items()
    }
    latents: dict[str | None, Latents] = {None: pool_latents(cfg, model.latent_shape, model.sigmas, devices)}
    if SHADOW in cfg.samplers:
        prefix = with_option(cfg, "family", "prefix")
        latents["prefix"] = pool_latents(prefix, model.latent_shape, model.sigmas, devices)
    shards = devices if cfg.is_sharded else 1
    trained_shards = shards if cfg.model.train == "full" else 1
    storages = [cfg.base_weights] if cfg.is_sharded else trained.storages
    policies = {name: math.ceil(stored[name] / shards) for name in storages}
    options = {key: None if key == "family" else reduce(getattr, key.split("."), cfg) for key in OPTIONS}
    size = {
        "policy": policies[cfg.base_weights],
        "merged": 0 if cfg.is_sharded else replica_bytes(weights, replaced),
        "shadow_packed": packed if SHADOW in cfg.samplers else 0,
        "shadow_here": shadows[backend],
        "trained": math.ceil((beside + averaged * average) / trained_shards),
        # Of float32 weights, and gradients of their rounded copy; with shards the base weights, beside what computes.
        "gradients_and_moments": math.ceil((3 * average + rounded) / trained_shards),
        "gathered": gathered,
        "autoencoder": bytes_of(model.pipeline.vae),
        "text_encoders": encoder_bytes(architecture, model.dtypes),
        "kept_latents": latents[None].kept,
        "pool_latents": latents[None].sampling,
        "rollout": cfg.model.rollout_batch * passes.sampling_bytes + cfg.model.decode_batch * passes.decoding_bytes,
    }
    always = ("merged", "trained", "gradients_and_moments", "gathered", "autoencoder")
    replicas = sum(size[name] for name in always)
    activations = passes.training_bytes, passes.sampling_bytes, passes.decoding_bytes
    footprint = Footprint(policies, shadows[backend], replicas, size["text_encoders"], *activations, latents)
    here = footprint.settled(options, room)
    size["training"] = cfg.model.micro_batch * passes.training_bytes[here[RECOMPUTED]]
    parameters = sum(weight.numel() for weight in weights.values())
    checkpoint = CHECKPOINT_BYTES * trained_weights - (not averaged) * average
    return Plan(model, architecture, layers, passes, parameters, size, checkpoint, footprint, options, here, shadows)


def without_files(cfg: Run) -> Run:
    """Return a copy of the configuration whose model reads config files only."""
    changed = cfg.model_copy(deep=True)
    policy: dict[str, Any] = changed.model.policy  # type: ignore[assignment]
    policy.update(dict.fromkeys({"embeddings", "preview_decoder", "transformer_weights", "fused_lora"} & policy.keys()))
    return changed


def settle_checkpointing(cfg: Run, device: torch.device, devices: int = 1) -> Run:
    """Return the options for training on one of ``devices`` with a choice for ``auto``, and log it.

    Call it when the rewards are on the device: they may take more than `RESERVE`.
    """
    blocks: Any = True
    if config_folder(cfg.model.pretrained) is None:
        log.info("%s=auto is true: there are no config files of %s to plan by", RECOMPUTED, cfg.model.pretrained)
    else:
        room = total_memory(device) - RESERVE * 1e9
        if device.type == "cuda":
            room = min(room, torch.cuda.mem_get_info(device)[0] - _ALLOCATOR)
        backend = resolve_from(cfg.ckpt, cfg.precision.name, cfg.precision.backend, device)
        run = plan_run(without_files(cfg), backend, devices=devices, room=room)
        blocks = run.here[RECOMPUTED]
        log.info("%s", run.footprint.explain(run.options, room))
    settled = cfg.model_copy(deep=True)
    settled.model.gradient_checkpointing = blocks
    policy: dict[str, Any] = settled.model.policy  # type: ignore[assignment]
    policy.update(dict.fromkeys(policy.keys() & {"gradient_checkpointing"}, blocks))
    return settled


def pool_latents(cfg: Run, shape: Sequence[int], sigmas: Sigmas, devices: int = 1) -> Latents:
    """Return the bytes of the latents of an iteration on one of ``devices``; one candidate's have ``shape``."""
    objective = build_objective(cfg.objective)
    stages, prompts = cfg.family.stages(sigmas, objective.solver), math.ceil(cfg.prompts_per_iteration / devices)
    transitions = len(objective.transitions(stages[-1].steps, 0))
    return latent_bytes(stages, cfg.family.pool, cfg.family.keep, transitions, 4 * prompts * math.prod(shape))


def layer_statistics(layers: Sequence[LayerPlan]) -> Json:
    """Return the numbers of linear layers that the shadow quantises and keeps, and the share of weights quantised."""
    quantized = [layer for layer in layers if layer.quantized]
    weights, all_weights = (sum(p.in_features * p.out_features for p in part) for part in (quantized, layers))
    return {
        "quantised_layers": len(quantized),
        "kept_layers": len(layers) - len(quantized),
        "share_of_linear_parameters": weights / all_weights,
    }


def cards_of(task: PlanOptions, device: torch.device) -> list[Card]:
    """Return this machine's GPU, if ``device`` is one, and ``task.cards``."""
    cards = [
        Card(Hardware(card.name, capability=divmod(round(10 * card.capability), 10)), card.memory)
        for card in task.cards
    ]
    if device.type == "cuda":
        cards.insert(0, Card(hardware_of(device), torch.cuda.get_device_properties(device).total_memory / 1e9))
    return cards


def on_card(plan: Plan, card: Card, backend: Backend, task: PlanOptions) -> Json:
    """Return arguments that fit ``card``, its shadow in ``backend``, with ``task.reserve`` GB left; or come nearest."""
    footprint = plan.footprint._replace(shadow=plan.shadows[backend])
    options = fit(footprint, plan.options, room := round((card.memory - task.reserve) * 1e9))
    if footprint.settled(unsettled := {**options, RECOMPUTED: plan.options[RECOMPUTED]}, room) == options:
        options = unsettled  # auto is that
    peak = footprint.peak(footprint.settled(options, room))
    this_run = footprint.settled(plan.options, room)
    arguments = overrides(options, plan.options)
    with_shadow = footprint.shadow > 0 and options["family"] is None
    precision = [f"precision={backend.precision}"] if with_shadow else []
    replaced = ("task", "precision", "precision.backend", *(argument.partition("=")[0] for argument in arguments))
    command = [a for a in task.overrides if a.partition("=")[0] not in replaced and not a.startswith("task.")]
    return {
        "card": card.hardware.name,
        "memory": card.memory,
        "capability": "{}.{}".format(*card.hardware.capability),
        "precision": backend.precision if footprint.shadow else None,
        "bits_a_weight": backend.bits_per_weight if footprint.shadow else None,
        "first_run": first_run(card.hardware, shadow_fits=options["family"] is None).options,
        "gradient_checkpointing": this_run[RECOMPUTED],
        "peak_of_this_run": footprint.peak(this_run),
        "fits": peak <= room,
        "peak": peak,
        "arguments": [*command, *precision, *arguments],
    }
