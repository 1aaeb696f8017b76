"""task=doctor: measures in about a minute whether this machine can do the run.

Layers and blocks have the sizes of the chosen model and random weights, so only the rows about files need files.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from hydra.utils import get_object

from solrl_lightning import IMPORTED
from solrl_lightning.artifacts.files import write_atomically
from solrl_lightning.artifacts.tables import OK, SKIPPED, SLOW, WRONG, Row, format_row, write_json
from solrl_lightning.build import build_objective, build_rewards, device_of, stages_of, uses_shadow, with_option
from solrl_lightning.callbacks.common import file_logger
from solrl_lightning.errors import CheckFailed, UserError
from solrl_lightning.options.model import Model
from solrl_lightning.options.reward import REWARD_FILES
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Benchmark, Doctor
from solrl_lightning.policies.compilation import should_compile
from solrl_lightning.quantization import resolve_from
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rollout.stage import STAGES
from solrl_lightning.sizing.doctor_attention import attention, shapes_of
from solrl_lightning.sizing.doctor_machine import environment, local_path, locate
from solrl_lightning.sizing.doctor_shadow import (
    NO_SHADOW,
    blocks,
    compare_backends,
    judge_backend,
    layers,
    without_files,
)
from solrl_lightning.tasks.benchmark import peak_memory, run_iterations
from solrl_lightning.tasks.plan import Json, Shapes, on_meta, pool_latents


def doctor(cfg: Run) -> Json:
    """Print each row when it is measured, and write all to ``doctor.json``.

    Raises:
        CheckFailed: a row is wrong.
    """
    start, rows = time.perf_counter(), []
    logging.disable(logging.INFO)  # messages of a run's start would appear between the rows
    try:
        files = (locate(key, source) for key, source in sources(cfg).items())
        run = guarded("set-up", arithmetic(cfg), "a report of this with doctor.json")
        for row in chain(environment(cfg.run_dir), files, run):
            rows.append(row)
            print(format_row(row), flush=True)
    finally:
        logging.disable(logging.NOTSET)
    counts = {status: sum(row.status == status for row in rows) for status in (OK, SLOW, WRONG, SKIPPED)}
    result = {
        "model": cfg.model.pretrained,
        "weights": cfg.model.weights,
        "precision": cfg.precision.model_dump(),
        "stages": [stage._asdict() for stage in stages_of(cfg)],
        "rewards": list(cfg.reward.members),
        "counts": counts,
        "rows": [row._asdict() for row in rows],
        "peak_memory": peak_memory(torch.device("cpu"))["bytes"],
        "seconds": time.perf_counter() - start,
        "seconds_since_process_start": time.perf_counter() - IMPORTED,
    }
    path = Path(cfg.run_dir) / "doctor.json"
    write_json(path, result)
    counted = ", ".join(f"{n} {status}" for status, n in counts.items())
    whole = f"{result['seconds_since_process_start']:.0f} s since the process started"
    print(f"{counted}, in {result['seconds']:.0f} s ({whole})\n  {path}")
    if counts[WRONG]:
        wrong = dict.fromkeys(row.check for row in rows if row.status == WRONG)
        raise CheckFailed(f"wrong here: {', '.join(wrong)}; the lines above say what to do.")
    return result


def guarded(check: str, rows: Iterator[Row], way_out: str) -> Iterator[Row]:
    """Yield the rows, and a wrong row in place of an error, so that the report is complete."""
    try:
        yield from rows
    except UserError as error:  # its message has the way out
        yield Row(check, WRONG, str(error))
    except Exception as error:
        file_logger.exception("%s", check)
        yield Row(check, WRONG, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", way_out)


def arithmetic(cfg: Run) -> Iterator[Row]:
    """Yield the rows about the run: precision, layers, compilation, memory, reward, iterations."""
    device = device_of(cfg)
    on_gpu = device.type == "cuda"
    backend = resolve_from(cfg.ckpt, cfg.precision.name, cfg.precision.backend, device)
    compiled, _ = should_compile("family.compile", "rollouts", cfg.family.compile, device)
    compiled = compiled and on_gpu  # on a CPU compilation takes a minute
    shadow = backend if uses_shadow(cfg) else None
    model = on_meta(without_files(cfg), backend)
    yield judge_backend(backend, device, shadow is not None)
    if shadow is not None and shadow.linear_cls is not None:
        rows = layers(model, shadow, cfg.model.rollout_batch, device, compiled)
        yield from guarded("layers", rows, f"another precision, or {NO_SHADOW}")
        if on_gpu:
            rows = compare_backends(model, shadow, cfg.model.rollout_batch, device, compiled)
            yield from guarded("backends", rows, "another precision.backend")
    yield from guarded("compilation", blocks(cfg, model, shadow, device, compiled), "family.compile=false")
    if on_gpu:
        batches = cfg.model.rollout_batch, cfg.model.micro_batch
        yield from guarded("attention", attention(shapes_of(model.policy), batches, device), "another version of torch")
    memory = judge_memory(held(model, cfg.model.weights), total_memory(device), cfg.model, on_gpu)
    yield memory
    absent = [key for key, source in rewards_of(cfg).items() if local_path(source) is None]
    if absent:
        scored = [Row("reward", SKIPPED, f"the files of {', '.join(absent)} are not on this machine")]
    else:
        scored = list(guarded("reward", scores(cfg, device), "reward.pretrained=<folder>"))
    yield from scored
    count = cfg.task_as(Doctor).iterations
    if count is None:
        count = 2 if cfg.model.pretrained == "tiny" or (cfg.model.weights == "random" and on_gpu) else 0
    obstacles = [*absent, *(row.check for row in (memory, *scored) if row.status == WRONG)]
    if count and obstacles:
        yield Row("iterations", SKIPPED, f"because of {', '.join(obstacles)}: see above")
    elif count:
        rows = iterations(cfg, model, device, count)
        yield from guarded("iterations", rows, "a smaller model.rollout_batch or model.micro_batch, if memory is short")


# Memory, reward, iterations


def total_memory(device: torch.device) -> int:
    """Bytes of the GPU, of the system, or of the container's limit."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))


def held(model: Shapes, weights: str) -> dict[str, int]:
    """The plan's bytes by part, without parts that this machine does not hold."""
    left_out = ["shadow_packed", "text_encoders"] if weights == "random" else ["shadow_packed"]
    return {name: size for name, size in model.bytes.items() if name not in left_out}


def planned_bytes(parts: Mapping[str, int], on_gpu: bool) -> int:
    """Planned peak in bytes. A GPU holds text encoders, activations of training and of sampling at different times."""
    stages = [("text_encoders",), ("training",), ("rollout", "pool_latents")]
    passing = [sum(parts.get(name, 0) for name in stage) for stage in stages]
    return sum(parts.values()) - sum(passing) + (max(passing) if on_gpu else sum(passing))


def judge_memory(parts: Mapping[str, int], total: int, model: Model, on_gpu: bool) -> Row:
    planned = planned_bytes(parts, on_gpu)
    largest = sorted(parts, key=lambda name: -parts[name])[:4]
    found = (
        f"{planned / 1e9:.3g} GB planned of {total / 1e9:.3g} GB, rewards not counted; most for "
        f"{', '.join(f'{name} {parts[name] / 1e9:.2g}' for name in largest)}"
    )
    measured = {"planned": planned, "total": total, "parts": dict(parts)}
    if planned <= total:
        return Row("memory", OK, found, "", measured)
    kept, batch = parts["training"], model.micro_batch

    def fits(changed: Mapping[str, int]) -> bool:
        return planned_bytes({**parts, **changed}, on_gpu) <= total

    ways = [f"model.micro_batch={n}" for n in range(1, batch) if fits({"training": kept * n // batch})][-1:]
    if not model.gradient_checkpointing and fits({"training": 0}):
        ways.append("model.gradient_checkpointing=true")
    if parts["shadow_here"] and fits({"shadow_here": 0}):
        ways.append(NO_SHADOW)
    return Row("memory", WRONG, found, ", or ".join(ways) or "a smaller model, or a device with more", measured)


def sources(cfg: Run) -> dict[str, str]:
    """key -> path or hub id of a run's files. The embedded model and random weights need none."""
    names = ["pretrained", "preview_decoder", "transformer_weights"] if cfg.model.weights == "pretrained" else []
    found = {f"model.{name}": getattr(cfg.model, name) for name in names}
    return {key: source for key, source in found.items() if source not in (None, "tiny")} | rewards_of(cfg)


def rewards_of(cfg: Run) -> dict[str, str]:
    """key -> path or hub id of the rewards' files."""
    found: dict[str, str] = {}
    for name, member in cfg.reward.members.items():
        if "pretrained" in member and cfg.reward.pretrained is not None:
            member["pretrained"] = cfg.reward.pretrained
        found |= {f"reward.{name}.{k}": member[k] for k in REWARD_FILES if k in member}
    return found


def with_local_rewards(cfg: Run) -> Run:
    """A copy with local folders instead of hub ids, so that loading does not access the hub."""
    changed = cfg.model_copy(deep=True)
    changed.reward.pretrained = None
    for key, source in rewards_of(cfg).items():
        _, name, part = key.split(".")
        changed.reward.entries[name][part] = str(local_path(source))
    return changed


def scores(cfg: Run, device: torch.device) -> Iterator[Row]:
    """Load the rewards, score one image, and yield the row."""
    start = time.perf_counter()
    rewards = build_rewards(with_local_rewards(cfg), device)
    image = torch.rand(1, 3, cfg.model.resolution, cfg.model.resolution, device=device)
    examples = {name: reward.example for name, reward in rewards.rewards.items()}
    found = {name: rewards.rewards[name](image, [text], [metadata]) for name, (text, metadata) in examples.items()}
    named = ", ".join(f"{name} {score.item():.3g}" for name, score in found.items())
    yield Row("reward", OK, f"loaded, and one image of noise scored in {time.perf_counter() - start:.1f} s: {named}")


def prompts_for(cfg: Run) -> str:
    """A source of prompts that all rewards can score: captions, or the example of a reward that needs other prompts."""
    targets = [get_object(member["_target_"]) for member in cfg.reward.members.values()]
    for text, metadata in (getattr(target, "example", Reward.example) for target in targets):
        if text != Reward.example[0]:
            file = Path(cfg.run_dir) / "doctor.jsonl"
            write_atomically(file, json.dumps({"prompt": text, **metadata}).encode())
            return str(file)
    return "shapes-train"


def small(cfg: Run, count: int) -> Run:
    """A copy with one prompt, a pool that fills one rollout batch, and kept samples that fill one micro-batch."""
    changed = with_option(with_local_rewards(cfg), "data", "shapes")
    changed.data.train = prompts_for(cfg)
    levels = build_objective(cfg).rows_per_sample(cfg.family.regenerate.steps)
    changed.prompts_per_iteration = 1
    changed.family.keep = min(cfg.family.keep, 2 * math.ceil(cfg.model.micro_batch / levels / 2))
    changed.family.pool = min(cfg.family.pool, max(cfg.model.rollout_batch, changed.family.keep))
    changed.task = Benchmark.model_construct(reads=["train"], repeats=count - 1)
    return changed


def iterations(cfg: Run, model: Shapes, device: torch.device, count: int) -> Iterator[Row]:
    """Run whole iterations of training, and yield the row with their time and memory and the plan's."""
    own = small(cfg, count)
    laps = run_iterations(own, device)
    latents = pool_latents(own, model.policy.latent_shape)
    parts = held(model, cfg.model.weights) | {"pool_latents": latents.sampling, "kept_latents": latents.kept}
    peak, planned = peak_memory(device), planned_bytes(parts, device.type == "cuda")
    stages = [{stage: lap[stage] for stage in STAGES if lap[stage] > 0} for lap in laps]
    last = ", ".join(f"{name} {seconds:.2f}" for name, seconds in stages[-1].items())
    found = (
        f"{count} of 1 prompt, {own.family.pool} candidates, {own.family.keep} kept: {laps[0]['iteration']:.1f} s "
        f"with warm-up, the last {laps[-1]['iteration']:.1f} s ({last}); peak memory of {peak['of']} "
        f"{peak['bytes'] / 1e9:.3g} GB, planned {planned / 1e9:.3g} GB"
    )
    measured = {
        "laps": [{"seconds": lap["iteration"], "stages": spent} for lap, spent in zip(laps, stages, strict=True)],
        "peak_memory": peak,
        "peak_memory_reserved": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        "planned": planned,
    }
    yield Row("iterations", OK, found, "", measured)
