"""task=plan: what a run computes and holds, at the real size of its model, before anything is downloaded.

The policy is built on the device ``meta``, where tensors have shapes and no numbers, and is called as a run calls it.
So multiply-adds (MACs) are counted by PyTorch's own counter over what really runs: linear layers, convolutions,
attention. Bytes follow from the same modules. All of it is arithmetic; ``task=benchmark`` measures.

Left out: reward models, whose size only their files tell; the text encoders' arithmetic, once per prompt; activations
of sampling; what CUDA and the allocator take for themselves.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from solrl_lightning.build import device_of, lora_config, quantization_rule, stages_of, with_option
from solrl_lightning.errors import UserError
from solrl_lightning.module import Stage
from solrl_lightning.policies import adapters
from solrl_lightning.policies.adapters import TRAINED
from solrl_lightning.policies.architectures import Architecture, build_component, find_architecture
from solrl_lightning.policies.pipeline import PipelinePolicy
from solrl_lightning.quantization import Backend, LayerPlan, resolve
from solrl_lightning.quantization import format_table as format_layers
from solrl_lightning.quantization import plan as plan_layers
from solrl_lightning.rollout import training_rows
from solrl_lightning.rollout.stage import Policy
from solrl_lightning.tasks.report import format_table, write_json

PUBLISHED_COPIES = 3  # of the BF16 transformer: the policy, one for torch.compile, one for low precision
PACKED_BITS = {"nvfp4": 4.5, "fp8": 8.0, "int8": 8.0, "bf16": 16.0}  # a weight and its part of a block's scale

Json = dict[str, Any]


class Passes(NamedTuple):
    """MACs of one image."""

    forward: int
    layers: Mapping[str, int]
    """Of these, those of each linear layer and convolution, by name."""
    adapted: int
    """Of a forward pass with LoRA branches."""
    backward: int
    """Through the frozen weights to the LoRA's, and what it computes again."""
    decode: int
    kept: int
    """Bytes that a forward pass keeps for its backward pass."""
    preview: int = 0
    """Of decoding by the preview decoder, where there is one."""


class Family(NamedTuple):
    """A way from a pool to training samples, as data."""

    name: str
    stages: Sequence[Stage]
    pool: int
    keep: int


class Iteration(NamedTuple):
    """What does not depend on the family."""

    prompts: int
    """Of all devices together."""
    devices: int
    timestep_fraction: float
    micro_batch: int
    kl_needs_reference: bool
    old_velocity: str
    """The sampler whose velocity is the old policy's in training."""


# Multiply-adds


def count_macs(run: Callable[[], Any], module: nn.Module) -> tuple[int, dict[str, int]]:
    """MACs of ``run()``, and of them those of each linear layer and convolution of ``module``."""
    layers: dict[str, int] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(layer: Any, inputs: Any, output: Tensor) -> None:
            layers[name] = layers.get(name, 0) + output.numel() // layer.weight.shape[0] * layer.weight.numel()

        return hook

    kinds = (nn.Linear, nn.Conv2d)
    handles = [m.register_forward_hook(record(name)) for name, m in module.named_modules() if isinstance(m, kinds)]
    with FlopCounterMode(display=False) as counter:
        run()
    for handle in handles:
        handle.remove()
    return counter.get_total_flops() // 2, layers


@contextmanager
def fused_attention() -> Iterator[None]:
    """Attention as a GPU does it. On ``meta`` PyTorch would write out, and keep, the matrix of all pairs of tokens.

    Replaces PyTorch's function; a TorchFunctionMode would not reach into what checkpoints compute again.
    """

    def fused(query: Tensor, key: Tensor, value: Tensor, *unused: Any, **also_unused: Any) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]

    before = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = before


@contextmanager
def kept_for_backward(module: nn.Module) -> Iterator[list[int]]:
    """Collects the bytes that autograd keeps: each storage once, and none of the parameters of ``module``."""
    seen = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    alive: list[Any] = []  # so that no address is given twice
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            alive.append(storage)
            sizes.append(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def trace(policy: Policy, lora: LoraConfig, previews: bool = False) -> tuple[Passes, dict[str, LoraLayer]]:
    """The passes of a policy on ``meta``. It gets adapters by this; the adapted layers are returned by name."""
    conditioning = policy.encode(["a prompt"])
    x = policy.noise(torch.zeros(1, dtype=torch.int64))
    sigma = torch.ones(1, device=policy.device)

    def velocity() -> Tensor:
        return policy.velocity(policy.transformer, x, sigma, conditioning)

    with torch.no_grad():
        forward, layers = count_macs(velocity, policy.transformer)
        decode, _ = count_macs(lambda: policy.decode(x), policy.transformer)
        preview = count_macs(lambda: policy.preview(x), policy.transformer)[0] if previews else 0
    with torch.device(policy.device):  # PEFT would leave the adapters of layers on meta on the CPU
        adapted_layers = adapters.add_adapters(policy.transformer, lora, seed=0)
    policy.transformer.train()
    with fused_attention():
        with kept_for_backward(policy.transformer) as kept, FlopCounterMode(display=False) as there:
            loss = velocity().sum()
        with FlopCounterMode(display=False) as back:
            loss.backward()
    adapted, backward = there.get_total_flops() // 2, back.get_total_flops() // 2
    return Passes(forward, layers, adapted, backward, decode, sum(kept), preview), adapted_layers


def shares(layers: Sequence[LayerPlan], passes: Passes) -> Json:
    """How much of the model the shadow quantises, of its linear weights and of all that it computes."""
    quantized = [p for p in layers if p.quantized]
    kept = [p for p in layers if not p.quantized]
    weights, macs = _weights(quantized), sum(passes.layers[p.name] for p in quantized)
    return {
        "quantised_layers": len(quantized),
        "kept_layers": len(kept),
        "share_of_linear_parameters": weights / (weights + _weights(kept)),
        "share_of_macs": macs / passes.forward,
        "quantised_macs": macs,
        "kept_linear_macs": sum(passes.layers[p.name] for p in kept),
        "forward_macs": passes.forward,
        "decode_macs": passes.decode,
        "train_forward_macs": passes.adapted,
        "train_backward_macs": passes.backward,
    }


def _weights(layers: Sequence[LayerPlan]) -> int:
    return sum(layer.in_features * layer.out_features for layer in layers)


# Bytes


def bytes_of(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in chain(module.parameters(), module.buffers()))


def replica_bytes(
    weights: Mapping[str, Tensor], adapted: Collection[str], quantized: Collection[str] = (), bits: float = 16
) -> int:
    """What a replica owns of the linear ``weights``: the quantised ones at ``bits``, and others that LoRA adapts."""
    packed = sum(weights[name].numel() for name in quantized) * bits / 8
    own = sum(weights[name].numel() * weights[name].itemsize for name in adapted if name not in quantized)
    return math.ceil(packed) + own


def encoder_bytes(architecture: Architecture, dtypes: Mapping[str, torch.dtype]) -> int:
    parts = {name: part for name, part in architecture.components.items() if name.startswith("text_encoder")}
    return sum(
        bytes_of(build_component(part, "meta", dtypes.get(name, dtypes["default"]))) for name, part in parts.items()
    )


# Model evaluations: forward passes of the transformer for one image


def evaluations(family: Family) -> dict[str, int]:
    """Of one prompt, by stage. A trajectory that exploration stopped goes on from there."""
    counts, done, images = {}, 0, family.pool
    for stage in family.stages:
        end = stage.steps if stage.stop_after is None else stage.stop_after
        counts[stage.name] = images * (end - done)
        done = 0 if stage.stop_after is None else end
        images = family.keep
    return counts


def work(family: Family, iteration: Iteration, passes: Passes, quantized_macs: int, speedup: float) -> Json:
    """One iteration's evaluations and MACs; those of quantised layers in the shadow count for 1 / ``speedup``."""
    cost = {
        "policy": passes.adapted,
        "merged": passes.forward,
        "shadow": passes.forward - quantized_macs + quantized_macs / speedup,
    }
    counts = evaluations(family)
    prompts = math.ceil(iteration.prompts / iteration.devices)
    timesteps = max(1, int(family.stages[-1].steps * iteration.timestep_fraction))
    batches = training_rows.plan(iteration.prompts, family.keep, timesteps, iteration.micro_batch, iteration.devices)
    rows = batches.micro_batches * batches.rows
    images = [family.pool, *[family.keep] * (len(family.stages) - 1)]
    decoding = {"full": passes.decode, "preview": passes.preview}
    macs = {stage.name: prompts * counts[stage.name] * cost[stage.sampler] for stage in family.stages}
    decoded = [count * decoding[stage.decoder] for count, stage in zip(images, family.stages, strict=True)]
    macs["decode"] = prompts * sum(decoded)
    without_gradients = cost[iteration.old_velocity] + iteration.kl_needs_reference * passes.forward
    macs["train"] = rows * (passes.adapted + passes.backward + without_gradients)
    return {
        "family": family.name,
        "prompt": counts,
        "all_devices": {name: iteration.prompts * count for name, count in counts.items()},
        "device": {name: prompts * count for name, count in counts.items()},
        "decodes": prompts * sum(images),
        "train_rows": rows,
        "train_forwards": rows * (2 + iteration.kl_needs_reference),
        "train_backwards": rows,
        "macs": macs | {"iteration": sum(macs.values())},
    }


def seconds(macs: dict[str, float], tflops: float, decoder_dtype: torch.dtype) -> dict[str, float]:
    """Of each stage and their sum, at ``tflops`` in BF16; float32 decoding by TF32 units has half of that rate."""
    halved = {"decode": 2.0 if decoder_dtype == torch.float32 else 1.0}
    stages = {name: halved.get(name, 1.0) * 2 * count / (tflops * 1e12) for name, count in macs.items()}
    stages["iteration"] = sum(value for name, value in stages.items() if name != "iteration")
    return stages


# A run's model without its numbers


class Shapes(NamedTuple):
    """What a model computes and what a run with it holds on one device."""

    policy: PipelinePolicy
    """On ``meta``, with adapters."""
    architecture: Architecture
    layers: Sequence[LayerPlan]
    passes: Passes
    adapted: Mapping[str, LoraLayer]
    parameters: int
    bytes: dict[str, int]


def on_meta(cfg: DictConfig, backend: Backend) -> Shapes:
    policy = instantiate(cfg.model.policy, weights="random", embeddings=None, device="meta")
    architecture = find_architecture(policy.pretrained, policy.pipeline_class)
    layers = plan_layers(policy.transformer, quantization_rule(cfg), backend)
    weights = {layer.name: policy.transformer.get_submodule(layer.name).weight for layer in layers}
    parameters, held = sum(p.numel() for p in policy.transformer.parameters()), bytes_of(policy.transformer)
    passes, adapted = trace(policy, lora_config(cfg), previews=cfg.model.get("preview_decoder") is not None)
    lora = 4 * sum(weight.numel() for weight in adapters.adapter_state(adapted, TRAINED).values())
    quantized = [layer.name for layer in layers if layer.quantized]
    has_shadow = any(stage.sampler == "shadow" for stage in stages_of(cfg))
    packed, here = (
        replica_bytes(weights, adapted, quantized, bits) if has_shadow else 0
        for bits in (PACKED_BITS[backend.precision], backend.bits_per_weight)
    )
    size = {
        "policy": held,
        "merged": replica_bytes(weights, adapted),
        "shadow_packed": packed,
        "shadow_here": here,
        "lora": (3 if cfg.callbacks and cfg.callbacks.get("ema") else 2) * lora,
        "gradients_and_moments": 3 * lora,
        "autoencoder": bytes_of(policy.pipeline.vae),
        "text_encoders": encoder_bytes(architecture, policy.dtypes),
        "kept_for_backward": cfg.model.micro_batch * passes.kept,
    }
    return Shapes(policy, architecture, layers, passes, adapted, parameters, size)


# The task


def plan(cfg: DictConfig) -> Json:
    """Prints what a run of ``cfg`` takes, and writes it to ``plan.json``."""
    _check(cfg.task, cfg.prompts_per_iteration)
    backend = resolve(cfg.precision.name, cfg.precision.backend, device_of(cfg))
    model = on_meta(cfg, backend)
    policy, layers, passes, size = model.policy, model.layers, model.passes, model.bytes
    share, held = shares(layers, passes), size["policy"]
    packed, here = PACKED_BITS[backend.precision], backend.bits_per_weight
    families = [_family("this run", cfg)]
    families += [_family(name, with_option(cfg, "family", name)) for name in cfg.task.families]
    iteration = Iteration(
        prompts=cfg.prompts_per_iteration,
        devices=cfg.task.devices,
        timestep_fraction=cfg.model.train_timestep_fraction,
        micro_batch=cfg.model.micro_batch,
        kl_needs_reference=cfg.objective.get("kl_weight") != 0,
        old_velocity=cfg.old_velocity,
    )
    speedup = cfg.task.speedup or 1.0
    rows = [work(family, iteration, passes, share["quantised_macs"], speedup) for family in families]
    if cfg.task.tflops is not None:
        for row in rows:
            row["seconds"] = seconds(row["macs"], cfg.task.tflops, policy.pipeline.vae.dtype)
    result = {
        "architecture": model.architecture.name,
        "resolution": policy.resolution,
        "latents": list(policy.latent_shape),
        "parameters": model.parameters,
        "precision": backend.precision,
        "backend": backend.name,
        "bits_a_weight": {"packed": packed, "here": here},
        "layers": share,
        "bytes": size,
        "weights_to_one_copy": {
            "packed": (held + size["merged"] + size["shadow_packed"]) / held,
            "here": (held + size["merged"] + size["shadow_here"]) / held,
            "published": float(PUBLISHED_COPIES),
        },
        "prompts_per_iteration": iteration.prompts,
        "devices": iteration.devices,
        "tflops": cfg.task.tflops,
        "speedup": speedup,
        "families": rows,
    }
    path = Path(cfg.run_dir) / "plan.json"
    write_json(path, result)
    print(f"{format_plan(result, format_layers(layers), cfg.model.micro_batch)}\n  {path}")
    return result


def _family(name: str, cfg: DictConfig) -> Family:
    return Family(name, stages_of(cfg), cfg.family.pool, cfg.family.keep)


def _check(options: DictConfig, prompts: int) -> None:
    if not isinstance(options.devices, int) or not 1 <= options.devices <= prompts:
        raise UserError(
            "every device needs at least one prompt an iteration, so task.devices must lie between 1 and "
            f"prompts_per_iteration={prompts}; got {options.devices}."
        )
    for name in ("tflops", "speedup"):
        value = options[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise UserError(f"task.{name} must be a number above 0, or null; got {value!r}.")


# The report


def format_plan(result: Json, layer_table: str, micro_batch: int) -> str:
    shape = " x ".join(map(str, result["latents"]))
    head = (
        f"{result['architecture']}: {result['parameters'] / 1e9:.2f} billion parameters; {result['resolution']} px, "
        f"latents {shape}\nThe layers of the shadow, precision={result['precision']}:"
    )
    return "\n\n".join(
        [
            f"{head}\n{layer_table}",
            _format_macs(result["layers"]),
            _format_bytes(result, micro_batch),
            _format_evaluations(result),
            _format_work(result),
        ]
    )


def _format_macs(share: Json) -> str:
    forward, linear = share["forward_macs"], share["quantised_macs"] + share["kept_linear_macs"]
    rows = [
        ("forward pass", forward, 1.0),
        ("  quantised layers", share["quantised_macs"], share["share_of_macs"]),
        ("  linear layers that are kept", share["kept_linear_macs"], share["kept_linear_macs"] / forward),
        ("  attention and other convolutions", forward - linear, (forward - linear) / forward),
        ("forward pass with LoRA branches", share["train_forward_macs"], None),
        ("its backward pass", share["train_backward_macs"], None),
        ("decoding", share["decode_macs"], None),
    ]
    cells = [[name, _si(macs), None if part is None else f"{100 * part:.1f} %"] for name, macs, part in rows]
    return "Multiply-adds (MACs) of one image:\n" + format_table(["", "MACs", "share"], cells)


def _format_bytes(result: Json, micro_batch: int) -> str:
    size, ratio, bits = result["bytes"], result["weights_to_one_copy"], result["bits_a_weight"]
    names = [
        ("policy", "policy"),
        ("merged", "merged replica: layers that LoRA adapts"),
        ("shadow_packed", f"shadow, packed at {bits['packed']:g} bits a weight"),
        ("shadow_here", f"shadow as {result['backend']} holds it here, {bits['here']:g} bits"),
        ("lora", "LoRA adapters in float32, with their average"),
        ("gradients_and_moments", "their gradients and AdamW moments"),
        ("autoencoder", "autoencoder"),
        ("text_encoders", "text encoders: on a GPU only while they encode"),
        ("kept_for_backward", f"kept for the backward pass of {micro_batch} rows (uncompiled)"),
    ]
    table = format_table(["", "bytes"], [[name, _si(size[key])] for key, name in names if size[key]])
    return (
        f"Bytes on one device (G of 10^9; not counted: reward models, activations of sampling):\n{table}\n"
        f"  weights of policy, merged replica and shadow: {ratio['packed']:.2f}x one copy if packed, "
        f"{ratio['here']:.2f}x here; published: {ratio['published']:.0f}x"
    )


def _format_evaluations(result: Json) -> str:
    columns = ["family", "explore", "regenerate", "a prompt", "all devices", "a device", "decodes", "train", "backward"]
    rows = []
    for row in result["families"]:
        explore, regenerate = row["prompt"].get("explore"), row["prompt"]["regenerate"]
        totals = [sum(row[scope].values()) for scope in ("prompt", "all_devices", "device")]
        train = [row["train_forwards"], row["train_backwards"]]
        rows.append([row["family"], explore, regenerate, *totals, row["decodes"], *train])
    return (
        f"Model evaluations (forward passes of one image) of an iteration of {result['prompts_per_iteration']} prompts "
        f"on {result['devices']} device(s); explore and regenerate for a prompt; decoding and training for a device:\n"
        + format_table(columns, rows)
    )


def _format_work(result: Json) -> str:
    columns = ["explore", "regenerate", "decode", "train", "iteration"]
    timed = result["tflops"] is not None
    rows = []
    for row in result["families"]:
        values = [row["seconds" if timed else "macs"].get(name) for name in columns]
        rows.append([row["family"], *(v if v is None else f"{v:.1f}" if timed else _si(v) for v in values)])
    if timed:
        what = (
            f"Seconds of a device if it did {result['tflops']:g} TFLOP/s in BF16, half of that in float32 decoding "
            f"(TF32) and {result['speedup']:g} times that in quantised products. Arithmetic, not a measurement:"
        )
    else:
        what = "MACs of a device in an iteration (task.tflops=, task.speedup= turn them into seconds):"
    return f"{what}\n{format_table(['family', *columns], rows)}"


def _si(number: float) -> str:
    """1.23 T: with the largest of the prefixes M, G, T, P that leaves at least 1."""
    for prefix, unit in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if number >= unit:
            return f"{number / unit:.2f} {prefix}"
    return f"{number / 1e6:.2f} M"
