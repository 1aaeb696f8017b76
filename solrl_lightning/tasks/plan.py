"""task=plan: computes the arithmetic and the memory of a run at the model's real size, without a download.

The policy is built on the device ``meta``, where tensors have shapes but no numbers, and is called as in a run.
PyTorch's counter counts the multiply-adds (MACs) of linear layers, convolutions and attention. Bytes follow from the
same modules. ``task=benchmark`` measures.

Not counted: the text encoders' arithmetic, once per prompt, and the memory that ``plan_memory`` leaves out.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from peft.tuners.lora import LoraLayer

from solrl_lightning.artifacts.tables import format_table, write_json
from solrl_lightning.build import (
    build_objective,
    device_of,
    lora_config,
    quantization_rule,
    stages_of,
    uses_shadow,
    with_option,
)
from solrl_lightning.errors import UserError
from solrl_lightning.names import AUTO
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Plan
from solrl_lightning.policies import adapters
from solrl_lightning.policies.adapters import TRAINED
from solrl_lightning.policies.architectures import Architecture, find_architecture
from solrl_lightning.policies.base_weights import block_linears
from solrl_lightning.policies.guidance import forward_passes
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.quantization import Backend, LayerPlan, resolve, resolve_from
from solrl_lightning.quantization import format_table as format_layers
from solrl_lightning.quantization import plan as plan_layers
from solrl_lightning.quantization.backends import PACKED_BITS, Hardware, hardware_of
from solrl_lightning.rollout.micro_batches import plan_micro_batches
from solrl_lightning.rollout.stage import EXPLORE, REGENERATE, candidates, evaluations
from solrl_lightning.sizing.plan_memory import (
    OPTIONS,
    Footprint,
    Latents,
    Options,
    bytes_of,
    encoder_bytes,
    fit,
    latent_bytes,
    overrides,
    replica_bytes,
    stored_bytes,
)
from solrl_lightning.sizing.plan_trace import CHECKPOINTING, Passes, trace
from solrl_lightning.targets import check_objective

PUBLISHED_COPIES = 3  # of the BF16 transformer: the policy, one for torch.compile, one for low precision

Json = dict[str, Any]


class Shapes(NamedTuple):
    """Arithmetic of a model, and memory of a run with it on one device."""

    policy: PipelineAdapter  # on ``meta``, with adapters
    architecture: Architecture
    layers: Sequence[LayerPlan]
    passes: Passes
    adapted: Mapping[str, LoraLayer]
    parameters: int
    bytes: dict[str, int]
    footprint: Footprint  # with the shadow as it is held here
    options: Options
    shadows: Mapping[Backend, int]  # bytes by backend


class Card(NamedTuple):
    """A GPU that a run may fit."""

    hardware: Hardware
    memory: float  # 10^9 bytes


def layer_statistics(layers: Sequence[LayerPlan], passes: Passes) -> Json:
    """The shares of the linear weights and of a forward pass that the shadow quantises, and the MACs of every pass."""
    quantized, kept = ([p for p in layers if p.quantized == wanted] for wanted in (True, False))
    weights, all_weights = (sum(p.in_features * p.out_features for p in part) for part in (quantized, layers))
    macs, kept_macs = (sum(passes.layers[p.name] for p in part) for part in (quantized, kept))
    return {
        "quantised_layers": len(quantized),
        "kept_layers": len(kept),
        "share_of_linear_parameters": weights / all_weights,
        "share_of_macs": macs / passes.forward,
        "quantised_macs": macs,
        "kept_linear_macs": kept_macs,
        "forward_macs": passes.forward,
        "decode_macs": passes.decode,
        "train_forward_macs": passes.adapted,
        "train_backward_macs": passes.backward,
    }


def on_meta(
    cfg: Run,
    backend: Backend,
    recomputed: Collection[bool | str] = CHECKPOINTING,
    devices: int = 1,
    others: Iterable[Backend] = (),
) -> Shapes:
    """The run's model on ``meta`` with its MACs and bytes on one of ``devices``.

    ``recomputed``: as in ``trace``. ``others``: further backends of the shadow to find the bytes of.
    """
    policy = instantiate(cfg.model.policy, weights="random", embeddings=None, device="meta")
    architecture = find_architecture(policy.pretrained, policy.pipeline_class)
    planned = {own: plan_layers(policy.transformer, quantization_rule(cfg), own) for own in (backend, *others)}
    layers = planned[backend]
    weights = {layer.name: policy.transformer.get_submodule(layer.name).weight for layer in layers}
    parameters = sum(p.numel() for p in policy.transformer.parameters())
    stored = stored_bytes(bytes_of(policy.transformer), block_linears(policy.transformer).values())
    checkpointing = cfg.model.gradient_checkpointing
    previews = cfg.model.policy.get("preview_decoder") is not None
    passes, adapted = trace(policy, lora_config(cfg), checkpointing, previews, recomputed)
    lora = 4 * sum(weight.numel() for weight in adapters.adapter_state(adapted, TRAINED).values())
    quantized = {own: [layer.name for layer in layers if layer.quantized] for own, layers in planned.items()}
    packed = replica_bytes(weights, adapted, quantized[backend], PACKED_BITS[backend.precision])
    shadows = {
        own: replica_bytes(weights, adapted, names, own.bits_per_weight) if uses_shadow(cfg) else 0
        for own, names in quantized.items()
    }
    latents: dict[str | None, Latents] = {None: pool_latents(cfg, policy.latent_shape, devices)}
    if uses_shadow(cfg):
        latents["prefix"] = pool_latents(with_option(cfg, "family", "prefix"), policy.latent_shape, devices)
    options = {key: None if key == "family" else reduce(getattr, key.split("."), cfg) for key in OPTIONS}
    size = {
        "policy": stored[cfg.base_weights],
        "merged": replica_bytes(weights, adapted),
        "shadow_packed": packed if uses_shadow(cfg) else 0,
        "shadow_here": shadows[backend],
        "lora": (3 if cfg.callback("ema") else 2) * lora,
        "gradients_and_moments": 3 * lora,
        "autoencoder": bytes_of(policy.pipeline.vae),
        "text_encoders": encoder_bytes(architecture, policy.dtypes),
        "kept_latents": latents[None].kept,
        "pool_latents": latents[None].sampling,
        "training": cfg.model.micro_batch * passes.training_bytes[checkpointing],
        "rollout": cfg.model.rollout_batch * passes.sampling_bytes + cfg.model.decode_batch * passes.decoding_bytes,
    }
    replicas = sum(size[name] for name in ("merged", "lora", "gradients_and_moments", "autoencoder"))
    activations = passes.training_bytes, passes.sampling_bytes, passes.decoding_bytes
    footprint = Footprint(stored, shadows[backend], replicas, size["text_encoders"], *activations, latents)
    return Shapes(policy, architecture, layers, passes, adapted, parameters, size, footprint, options, shadows)


def pool_latents(cfg: Run, shape: Sequence[int], devices: int = 1) -> Latents:
    """Bytes of the latents of an iteration of ``cfg`` on one of ``devices``; one candidate's have ``shape``."""
    stages, prompts = stages_of(cfg), math.ceil(cfg.prompts_per_iteration / devices)
    transitions = len(build_objective(cfg).transitions(stages[-1].steps, 0))
    return latent_bytes(stages, cfg.family.pool, cfg.family.keep, transitions, 4 * prompts * math.prod(shape))


def planned_peak(cfg: Run, policy: PipelineAdapter, devices: int = 1) -> int:
    """Bytes that a run of ``cfg`` with the loaded ``policy`` is planned to hold at most, on one of its ``devices``."""
    own = cfg.model_copy(deep=True)
    own.model.policy["pretrained"] = policy.pretrained if policy.random else policy.pipeline.config._name_or_path
    backend = resolve_from(cfg.ckpt, cfg.precision.name, cfg.precision.backend, policy.device)
    model = on_meta(own, backend, [cfg.model.gradient_checkpointing], devices)
    return model.footprint.peak(model.options)


# An iteration. An evaluation is a forward pass of the transformer for one image.


def iteration_cost(cfg: Run, passes: Passes, quantized_macs: int) -> Json:
    """Evaluations and MACs of an iteration; MACs of the shadow's quantised layers count for 1 / ``task.speedup``."""
    task = cfg.task_as(Plan)
    stages, pool, keep, devices = stages_of(cfg), cfg.family.pool, cfg.family.keep, task.devices
    cost = {
        "policy": passes.adapted,
        "merged": passes.forward,
        "shadow": passes.forward - quantized_macs + quantized_macs / (task.speedup or 1.0),
    }
    guided = forward_passes(cfg.model.guidance_scale)  # of a velocity
    counts: Counter[str] = Counter()
    for stage, count in zip(stages, evaluations(stages, pool), strict=True):
        counts[stage.name] += guided * count
    prompts = math.ceil(cfg.prompts_per_iteration / devices)
    objective = build_objective(cfg)
    per_prompt = keep * objective.rows_per_sample(stages[-1].steps)
    batches = plan_micro_batches(cfg.prompts_per_iteration, per_prompt, cfg.model.micro_batch, devices)
    rows = batches.micro_batches * batches.rows
    images = candidates(stages, pool)
    decoding = {"full": passes.decode, "bf16": passes.decode, "preview": passes.preview}
    macs = {
        stage.name: prompts * counts[stage.name] * cost[stage.sampler] for stage in stages
    }  # a race has one sampler
    macs["decode"] = prompts * sum(n * decoding[stage.decoder] for n, stage in zip(images, stages, strict=True))
    others = {"old": cost[cfg.old_velocity], "reference": passes.forward}
    without_gradients = sum(objective.share_of(name) * others[name] for name in objective.needs)
    macs["train"] = rows * (passes.backward + guided * (passes.adapted + without_gradients))
    return {
        "prompt": counts,
        "all_devices": {name: cfg.prompts_per_iteration * count for name, count in counts.items()},
        "device": {name: prompts * count for name, count in counts.items()},
        "decodes": prompts * sum(images),
        "train_rows": rows,
        "train_forwards": round(guided * rows * objective.forward_passes),
        "train_backwards": rows,
        "macs": macs | {"iteration": sum(macs.values())},
    }


def seconds(macs: dict[str, float], tflops: float, decoder_dtype: torch.dtype) -> dict[str, float]:
    """Seconds of each stage and their sum, at ``tflops`` in BF16; float32 decoding by TF32 units has half the rate."""
    halved = {"decode": 2.0 if decoder_dtype == torch.float32 else 1.0}
    stages = {name: halved.get(name, 1.0) * 2 * count / (tflops * 1e12) for name, count in macs.items()}
    stages["iteration"] = sum(value for name, value in stages.items() if name != "iteration")
    return stages


# The task


def plan(cfg: Run) -> Json:
    """Print the compute and memory of a run of ``cfg``, and write them to ``plan.json``."""
    task = cfg.task_as(Plan)
    _check(task, cfg.prompts_per_iteration)
    check_objective(cfg.objective, cfg.family.regenerate.steps, cfg.model.guidance_scale)
    device = device_of(cfg)
    backend = resolve_from(cfg.ckpt, cfg.precision.name, cfg.precision.backend, device)
    cards = cards_of(task, device)
    backends = [resolve(cfg.precision.name, AUTO, card.hardware) for card in cards]
    model = on_meta(cfg, backend, devices=task.devices, others=backends)
    policy, size = model.policy, model.bytes
    statistics = layer_statistics(model.layers, model.passes)
    families = []
    this = "this run, last level" if cfg.family.levels else "this run"
    for name, own in [(this, cfg), *((name, with_option(cfg, "family", name)) for name in task.families)]:
        if min(evaluations(stages_of(own), own.family.pool)) < 0:
            continue  # a race whose rungs this model has too few steps for
        row = {"family": name, **iteration_cost(own, model.passes, statistics["quantised_macs"])}
        if task.tflops is not None:
            row["seconds"] = seconds(row["macs"], task.tflops, policy.pipeline.vae.dtype)
        families.append(row)
    copies = {
        where: (size["policy"] + size["merged"] + size[f"shadow_{where}"]) / size["policy"]
        for where in ("packed", "here")
    }
    result = {
        "architecture": model.architecture.name,
        "resolution": policy.resolution,
        "latents": list(policy.latent_shape),
        "parameters": model.parameters,
        "precision": backend.precision,
        "backend": backend.name,
        "bits_a_weight": {"packed": PACKED_BITS[backend.precision], "here": backend.bits_per_weight},
        "layers": statistics,
        "bytes": size,
        "training_bytes": {
            str(blocks).lower(): cfg.model.micro_batch * row for blocks, row in model.passes.training_bytes.items()
        },
        "planned_peak": model.footprint.peak(model.options),
        "reserve": task.reserve,
        "cards": [on_card(model, *each, task) for each in zip(cards, backends, strict=True)],
        "weights_to_one_copy": {**copies, "published": float(PUBLISHED_COPIES)},
        "prompts_per_iteration": cfg.prompts_per_iteration,
        "prompts_a_device": math.ceil(cfg.prompts_per_iteration / task.devices),
        "devices": task.devices,
        "tflops": task.tflops,
        "speedup": task.speedup or 1.0,
        "families": families,
    }
    path = Path(cfg.run_dir) / "plan.json"
    write_json(path, result)
    print(f"{format_plan(result, format_layers(model.layers), cfg.model.micro_batch)}\n  {path}")
    return result


def cards_of(task: Plan, device: torch.device) -> list[Card]:
    """This machine's GPU, if ``device`` is one, and ``task.cards``."""
    cards = [
        Card(Hardware(card.name, capability=divmod(round(10 * card.capability), 10)), card.memory)
        for card in task.cards
    ]
    if device.type == "cuda":
        cards.insert(0, Card(hardware_of(device), torch.cuda.get_device_properties(device).total_memory / 1e9))
    return cards


def on_card(model: Shapes, card: Card, backend: Backend, task: Plan) -> Json:
    """Arguments that fit ``card``, whose shadow is in ``backend``, with ``task.reserve`` GB left; or come nearest."""
    footprint = model.footprint._replace(shadow=model.shadows[backend])
    options = fit(footprint, model.options, room := round((card.memory - task.reserve) * 1e9))
    peak = footprint.peak(options)
    changed = overrides(options, model.options)
    with_shadow = footprint.shadow > 0 and options["family"] is None
    precision = [f"precision={backend.precision}"] if with_shadow else []
    replaced = ("task", "precision", "precision.backend", *(argument.partition("=")[0] for argument in changed))
    kept = [a for a in task.overrides if a.partition("=")[0] not in replaced and not a.startswith("task.")]
    return {
        "card": card.hardware.name,
        "memory": card.memory,
        "capability": "{}.{}".format(*card.hardware.capability),
        "precision": backend.precision if footprint.shadow else None,
        "bits_a_weight": backend.bits_per_weight if footprint.shadow else None,
        "peak_of_this_run": footprint.peak(model.options),
        "fits": peak <= room,
        "peak": peak,
        "arguments": [*kept, *precision, *changed],
    }


def _check(options: Plan, prompts: int) -> None:
    if options.devices > prompts:
        raise UserError(
            f"task.devices={options.devices} is invalid: every device needs at least one prompt an iteration, so it "
            f"must be between 1 and prompts_per_iteration={prompts}. Set task.devices=1."
        )
    for card in options.cards:
        if card.memory <= options.reserve:
            raise UserError(
                f"task.reserve={options.reserve} is invalid: it must be less than the memory of a card, and "
                f"{card.name} has {card.memory} GB. Set task.reserve=6, or leave the card out of task.cards."
            )


# The report


def format_plan(result: Json, layer_table: str, micro_batch: int) -> str:
    share, bits, ratio = result["layers"], result["bits_a_weight"], result["weights_to_one_copy"]
    forward, quantised, kept = share["forward_macs"], share["quantised_macs"], share["kept_linear_macs"]
    parts = {
        "forward pass": forward,
        "  quantised layers": quantised,
        "  linear layers that are kept": kept,
        "  attention and other convolutions": forward - quantised - kept,
    }
    shadow = f"The layers of the shadow, precision={result['precision']}:\n{layer_table}\n"
    if not result["bytes"]["shadow_here"]:
        shadow = ""
    macs = [[name, _si(value), f"{100 * value / forward:.1f} %"] for name, value in parts.items()]
    macs.append(["forward pass with LoRA branches", _si(share["train_forward_macs"]), "-"])
    macs.append(["its backward pass", _si(share["train_backward_macs"]), "-"])
    macs.append(["decoding", _si(share["decode_macs"]), "-"])
    labels = {
        "policy": "policy",
        "merged": "merged replica: layers that LoRA adapts",
        "shadow_packed": f"shadow, packed at {bits['packed']:g} bits a weight",
        "shadow_here": f"shadow as {result['backend']} holds it here, {bits['here']:g} bits",
        "lora": "LoRA adapters in float32, with their average",
        "gradients_and_moments": "their gradients and AdamW moments",
        "autoencoder": "autoencoder",
        "text_encoders": "text encoders: on a GPU only while they encode",
        "training": f"activations of training, {micro_batch} rows (uncompiled)",
        "kept_latents": "latents of the samples to train on",
        "pool_latents": f"latents of the pool of {result['prompts_a_device']} prompts in float32, while sampling",
        "rollout": "activations of sampling and decoding (uncompiled)",
    }
    held = [[label, _si(result["bytes"][key])] for key, label in labels.items() if result["bytes"][key]]
    training = ", ".join(f"{blocks} {_si(count)}" for blocks, count in result["training_bytes"].items())
    rows = [
        [
            f"{card['card']} ({card['capability']})",
            f"{card['memory']:.1f} G",
            card["precision"],
            _si(card["peak_of_this_run"]),
            _si(card["peak"]),
        ]
        for card in result["cards"]
    ]
    header, *lines = format_table(["card", "memory", "shadow", "this run", "fitted"], rows).splitlines()
    commands = [
        " ".join(["" if card["fits"] else "nothing fits, nearest:", "python -m solrl_lightning", *card["arguments"]])
        for card in result["cards"]
    ]
    cards = "\n".join([header, *(f"{line} {command}" for line, command in zip(lines, commands, strict=True))])
    counts = [
        [row["family"], row["prompt"].get(EXPLORE), row["prompt"][REGENERATE]]
        + [sum(row[scope].values()) for scope in ("prompt", "all_devices", "device")]
        + [row[name] for name in ("decodes", "train_forwards", "train_backwards")]
        for row in result["families"]
    ]
    count_columns = [EXPLORE, REGENERATE, "a prompt", "all devices", "a device", "decodes", "train", "backward"]
    stages = [EXPLORE, REGENERATE, "decode", "train", "iteration"]
    if result["tflops"] is None:
        work = "MACs of a device in an iteration (task.tflops=, task.speedup= turn them into seconds):"
        values, as_text = "macs", _si
    else:
        work = (
            f"Seconds of a device if it did {result['tflops']:g} TFLOP/s in BF16, half of that in float32 decoding "
            f"(TF32) and {result['speedup']:g} times that in quantised products. Arithmetic, not a measurement:"
        )
        values, as_text = "seconds", "{:.1f}".format
    costs = [
        [row["family"], *(as_text(row[values][stage]) if stage in row[values] else None for stage in stages)]
        for row in result["families"]
    ]
    return (
        f"{result['architecture']}: {result['parameters'] / 1e9:.2f} billion parameters; {result['resolution']} px, "
        f"latents {' x '.join(map(str, result['latents']))}\n"
        f"{shadow}\n"
        f"Multiply-adds (MACs) of one image:\n{format_table(['', 'MACs', 'share'], macs)}\n\n"
        "Bytes on one device (G of 10^9; not counted: reward models, CUDA):\n"
        f"{format_table(['', 'bytes'], held)}\n"
        f"  activations of training by model.gradient_checkpointing: {training}\n"
        f"  peak {_si(result['planned_peak'])} here: activations and text encoders are not there at the same time\n"
        f"  weights of policy, merged replica and shadow: {ratio['packed']:.2f}x one copy if packed, "
        f"{ratio['here']:.2f}x here; published: {ratio['published']:.0f}x\n\n"
        f"The peak on a card (compute capability), and the options whose peak leaves {result['reserve']:g} GB "
        "(task.reserve) for a reward model (4 for CLIP ViT-H in float32), CUDA and the allocator (2):\n"
        f"{cards}\n\n"
        f"Model evaluations (forward passes of one image) of an iteration of {result['prompts_per_iteration']} prompts "
        f"on {result['devices']} device(s); explore and regenerate for a prompt; decoding and training for a device:\n"
        f"{format_table(['family', *count_columns], counts)}\n\n"
        f"{work}\n{format_table(['family', *stages], costs)}"
    )


def _si(number: float) -> str:
    """1.23 T: with the largest of the prefixes M, G, T, P that leaves at least 1."""
    for prefix, unit in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if number >= unit:
            return f"{number / unit:.2f} {prefix}"
    return f"{number / 1e6:.2f} M"
