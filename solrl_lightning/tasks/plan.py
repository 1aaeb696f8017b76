"""task=plan: computes the layers and the memory of a run at the model's real size, without a download.

``sizing.plan`` counts. Not counted: what ``sizing.footprint`` leaves out.
"""

import math
from pathlib import Path

from solrl_lightning.artifacts.formatting import command_line
from solrl_lightning.artifacts.tables import format_table, write_json
from solrl_lightning.build import device_of
from solrl_lightning.errors import UserError
from solrl_lightning.machine.memory import total_memory
from solrl_lightning.names import AUTO
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Plan
from solrl_lightning.quantization import format_table as format_layers
from solrl_lightning.quantization import resolve, resolve_from
from solrl_lightning.quantization.backends import PACKED_BITS
from solrl_lightning.sizing.footprint import RECOMPUTED
from solrl_lightning.sizing.plan import Json, cards_of, layer_statistics, on_card, plan_run
from solrl_lightning.targets import check_objective

PUBLISHED_COPIES = 3  # of the BF16 transformer: the policy, one for torch.compile, one for low precision


def plan(cfg: Run) -> Json:
    """Print the layers and the memory of a run of ``cfg``, and write them to ``plan.json``."""
    task = cfg.task_as(Plan)
    _check(task, cfg.prompts_per_iteration)
    check_objective(cfg.objective, cfg.family.regenerate.steps, cfg.model.guidance_scale)
    device = device_of(cfg.trainer)
    backend = resolve_from(cfg.ckpt, cfg.precision.name, cfg.precision.backend, device)
    cards = cards_of(task, device)
    backends = [resolve(cfg.precision.name, AUTO, card.hardware) for card in cards]
    room = total_memory(device) - task.reserve * 1e9
    run = plan_run(cfg, backend, devices=task.devices, others=backends, room=room)
    size = run.bytes
    copies = {
        where: (size["policy"] + size["merged"] + size[f"shadow_{where}"]) / size["policy"]
        for where in ("packed", "here")
    }
    result = {
        "architecture": run.architecture.name,
        "resolution": run.model.resolution,
        "latents": list(run.model.latent_shape),
        "parameters": run.parameters,
        "precision": backend.precision,
        "backend": backend.name,
        "bits_a_weight": {"packed": PACKED_BITS[backend.precision], "here": backend.bits_per_weight},
        "layers": layer_statistics(run.layers),
        "bytes": size,
        "training_bytes": {
            str(blocks).lower(): cfg.model.micro_batch * row for blocks, row in run.passes.training_bytes.items()
        },
        "gradient_checkpointing": run.here[RECOMPUTED],
        "checkpoint_bytes": run.checkpoint_bytes,
        "planned_peak": run.footprint.peak(run.here),
        "reserve": task.reserve,
        "cards": [on_card(run, *each, task) for each in zip(cards, backends, strict=True)],
        "weights_to_one_copy": {**copies, "published": float(PUBLISHED_COPIES)},
        "prompts_per_iteration": cfg.prompts_per_iteration,
        "prompts_a_device": math.ceil(cfg.prompts_per_iteration / task.devices),
        "devices": task.devices,
    }
    path = Path(cfg.run_dir) / "plan.json"
    write_json(path, result)
    print(f"{format_plan(result, format_layers(run.layers), cfg.model.micro_batch)}\n  {path}")
    return result


def _check(task: Plan, prompts: int) -> None:
    if task.devices > prompts:
        raise UserError(
            f"task.devices={task.devices} is invalid: every device needs at least one prompt an iteration, so it "
            f"must be between 1 and prompts_per_iteration={prompts}. Set task.devices=1."
        )
    for card in task.cards:
        if card.memory <= task.reserve:
            raise UserError(
                f"task.reserve={task.reserve} is invalid: it must be less than the memory of a card, and {card.name} "
                f"has {card.memory} GB. Set task.reserve={card.memory / 4:g}, or leave the card out of task.cards."
            )


def format_plan(result: Json, layer_table: str, micro_batch: int) -> str:
    bits, ratio = result["bits_a_weight"], result["weights_to_one_copy"]
    shadow = f"\n\nThe layers of the shadow, precision={result['precision']}:\n{layer_table}"
    if not result["bytes"]["shadow_here"]:
        shadow = ""
    labels = {
        "policy": "policy",
        "merged": "merged replica: layers that are trained",
        "shadow_packed": f"shadow, packed at {bits['packed']:g} bits a weight",
        "shadow_here": f"shadow as {result['backend']} holds it here, {bits['here']:g} bits",
        "trained": "trained weights, old policy and average in float32",
        "gradients_and_moments": "their gradients and AdamW moments",
        "gathered": "weights and gradients of the blocks that are gathered",
        "autoencoder": "autoencoder",
        "text_encoders": "text encoders: on a GPU only while they encode",
        "training": f"activations of training, {micro_batch} rows (uncompiled)",
        "kept_latents": "latents of the samples to train on",
        "pool_latents": f"latents of the pool of {result['prompts_a_device']} prompts in float32, while sampling",
        "rollout": "activations of sampling and decoding (uncompiled)",
    }
    sizes = [[label, _si(result["bytes"][key])] for key, label in labels.items() if result["bytes"][key]]
    training = ", ".join(f"{blocks} {_si(count)}" for blocks, count in result["training_bytes"].items())
    rows = [
        [
            f"{card['card']} ({card['capability']})",
            f"{card['memory']:.1f} G",
            " ".join(option.partition("=")[2] for option in card["first_run"]),
            card["precision"],
            str(card["gradient_checkpointing"]).lower(),
            _si(card["peak_of_this_run"]),
            _si(card["peak"]),
        ]
        for card in result["cards"]
    ]
    columns = ["card", "memory", "first run", "shadow", "recomputed", "this run", "fitted"]
    header, *lines = format_table(columns, rows).splitlines()
    commands = [
        f"{'' if card['fits'] else 'nothing fits, nearest:'} {command_line(card['arguments'])}"
        for card in result["cards"]
    ]
    cards = "\n".join([header, *(f"{line} {command}" for line, command in zip(lines, commands, strict=True))])
    return (
        f"{result['architecture']}: {result['parameters'] / 1e9:.2f} billion parameters; {result['resolution']} px, "
        f"latents {' x '.join(map(str, result['latents']))}\n"
        f"\nThe peak on a card (compute capability), and the options whose peak leaves {result['reserve']:g} GB "
        "(task.reserve) for a reward model (4 for CLIP ViT-H in float32), CUDA and the allocator (2):\n"
        f"{cards}\n\n"
        "Bytes on one device (G of 10^9; not counted: reward models, CUDA):\n"
        f"{format_table(['', 'bytes'], sizes)}\n"
        f"  activations of training by {RECOMPUTED}: {training}; here {str(result['gradient_checkpointing']).lower()}\n"
        f"  a checkpoint {_si(result['checkpoint_bytes'])} on disk\n"
        f"  peak {_si(result['planned_peak'])} here: activations and text encoders are not there at the same time\n"
        f"  weights of policy, merged replica and shadow: {ratio['packed']:.2f}x one copy if packed, "
        f"{ratio['here']:.2f}x here; published: {ratio['published']:.0f}x"
        f"{shadow}"
    )


def _si(number: float) -> str:
    """Return the bytes in millions (M) or thousands of millions (G)."""
    return f"{number / 1e9:.2f} G" if number >= 1e9 else f"{number / 1e6:.2f} M"
