"""Rows of task=doctor about a run: its files, its memory, its rewards, and iterations in small."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from hydra.utils import get_object
from PIL import Image

from solrl_lightning.artifacts.files import write_atomically
from solrl_lightning.artifacts.pictures import to_png
from solrl_lightning.artifacts.tables import OK, Row, judged
from solrl_lightning.build import build_objective, build_rewards, with_option
from solrl_lightning.data.prompt import INPUT_IMAGE
from solrl_lightning.data.sources import file_of_split
from solrl_lightning.machine.memory import peak_memory
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Benchmark
from solrl_lightning.rewards.base import Reward
from solrl_lightning.sizing.environment import local_path
from solrl_lightning.sizing.footprint import Footprint, Options, fit, overrides
from solrl_lightning.sizing.plan import Plan, pool_latents
from solrl_lightning.sizing.timing import peak_since_release, run_iterations
from solrl_lightning.training.stopwatch import STOPWATCH_STAGES


def footprint_here(run: Plan, weights: str, on_gpu: bool) -> Footprint:
    """Return the plan's footprint here: random weights need no text encoders, and a CPU's memory keeps them."""
    encoders = 0 if weights == "random" else run.footprint.text_encoders
    if on_gpu:
        return run.footprint._replace(text_encoders=encoders)
    return run.footprint._replace(text_encoders=0, others=run.footprint.others + encoders)


def judge_memory(footprint: Footprint, options: Options, total: int, parts: Mapping[str, int]) -> Row:
    """Return the row on memory: wrong if the peak exceeds ``total`` bytes. ``parts``: the plan's bytes, to list."""
    planned = footprint.peak(options)
    largest = sorted(parts.keys() - {"shadow_packed"}, key=lambda name: -parts[name])[:4]
    text = (
        f"{planned / 1e9:.3g} GB planned of {total / 1e9:.3g} GB, rewards not counted; the largest parts, some of them "
        f"one after the other, are {', '.join(f'{name} {parts[name] / 1e9:.2g}' for name in largest)}"
    )
    measured = {"planned": planned, "total": total, "parts": dict(parts)}
    expected = f"at most {total / 1e9:.3g} GB: the memory of the device"
    smaller = fit(footprint, options, total)
    fits = footprint.peak(smaller) <= total
    way_out = " ".join(overrides(smaller, options)) if fits else "a smaller model, or a device with more memory"
    return judged("memory", text, way_out, measured, expected, wrong=planned > total)


def run_files(cfg: Run) -> dict[str, str]:
    """Return the paths or hub ids of a run's files by key. The embedded model and random weights need none."""
    names = ["pretrained", "preview_decoder", "transformer_weights"] if cfg.model.weights == "pretrained" else []
    models = {f"model.{name}": getattr(cfg.model, name) for name in names}
    return {key: source for key, source in models.items() if source not in (None, "tiny")} | cfg.reward.files


def with_local_rewards(cfg: Run) -> Run:
    """Return a copy with local folders instead of hub ids, so that loading does not access the hub."""
    changed = cfg.model_copy(deep=True)
    for key, source in cfg.reward.files.items():
        _, *name, part = key.split(".")
        if name:
            changed.reward.entries[name[0]][part] = str(local_path(source))
        else:
            changed.reward.pretrained = str(local_path(source))
    return changed


def check_rewards(cfg: Run, device: torch.device) -> Iterator[Row]:
    """Load the rewards, try them out as a run does, score one image, and yield the row."""
    start = time.perf_counter()
    rewards = build_rewards(with_local_rewards(cfg).reward, cfg.model.frames, device)
    image = torch.rand(1, 3, cfg.model.resolution, cfg.model.resolution, device=device)
    examples = {name: reward.example for name, reward in rewards.rewards.items()}
    inputs = {INPUT_IMAGE: str(grey_image(cfg))} if cfg.model.input_image else {}
    scores = {}
    for name, (text, row) in examples.items():
        rewards.rewards[name].try_out(image[0], text, {**row, **inputs})  # one request, where a score has its retries
        scores[name] = rewards.rewards[name](image, [text], [{**row, **inputs}])
    values = ", ".join(f"{name} {score.item():.3g}" for name, score in scores.items())
    yield Row("reward", OK, f"loaded, and one image of noise scored in {time.perf_counter() - start:.1f} s: {values}")


def grey_image(cfg: Run) -> Path:
    """Write a new file with an input image for a model that edits one."""
    file = Path(cfg.run_dir) / "doctor.png"
    write_atomically(file, to_png(Image.new("RGB", (64, 64), "grey")))
    return file


def prompts_for(cfg: Run) -> str:
    """Return a source of prompts that all rewards can score: captions, or the example of a reward."""
    targets = [get_object(member["_target_"]) for member in cfg.reward.members.values()]
    examples = [getattr(target, "example", Reward.example) for target in targets]
    text, metadata = next((each for each in examples if each[0] != Reward.example[0]), Reward.example)
    if text == Reward.example[0] and not cfg.model.input_image:
        return "shapes-train"
    if cfg.model.input_image:
        metadata = {**metadata, "image": grey_image(cfg).name}
    file = Path(cfg.run_dir) / "doctor.jsonl"
    write_atomically(file, json.dumps({"prompt": text, **metadata}).encode())
    return str(file)


def smoke_config(cfg: Run, count: int) -> Run:
    """Return a copy with one prompt, a pool of one rollout batch, and kept samples of one micro-batch.

    The prompt is of the run's file, if it has one.
    """
    changed = with_option(with_local_rewards(cfg), "data", "shapes")
    if Path(file := file_of_split(cfg.data.train, "train")).is_file():
        changed.data.train, changed.data.column = file, cfg.data.column
    else:
        changed.data.train = prompts_for(cfg)
    levels = build_objective(cfg.objective).rows_per_sample(cfg.family.regenerate.steps)
    changed.prompts_per_iteration = 1
    changed.family.keep = min(cfg.family.keep, 2 * math.ceil(cfg.model.micro_batch / levels / 2))
    changed.family.pool = min(cfg.family.pool, max(cfg.model.rollout_batch, changed.family.keep))
    changed.task = Benchmark.model_construct(reads=["train"], repeats=count - 1)
    return changed


def check_iterations(cfg: Run, run: Plan, device: torch.device, count: int) -> Iterator[Row]:
    """Run whole iterations of training, and yield the row with their time and memory and the plan's."""
    smoke = smoke_config(cfg, count)
    laps = run_iterations(smoke, device)
    latents = pool_latents(smoke, run.model.latent_shape, run.model.sigmas)
    footprint = footprint_here(run, cfg.model.weights, device.type == "cuda")._replace(latents={None: latents})
    peak, planned = peak_since_release(device), footprint.peak(run.here)
    stages = [{stage: lap[stage] for stage in STOPWATCH_STAGES if lap[stage] > 0} for lap in laps]
    last = ", ".join(f"{name} {seconds:.2f}" for name, seconds in stages[-1].items())
    text = (
        f"{count} of 1 prompt, {smoke.family.pool} candidates, {smoke.family.keep} kept: {laps[0]['iteration']:.1f} s "
        f"with warm-up, the last {laps[-1]['iteration']:.1f} s ({last}); peak memory of {peak['of']} "
        f"{peak['bytes'] / 1e9:.3g} GB, planned {planned / 1e9:.3g} GB"
    )
    measured = {
        "laps": [{"seconds": lap["iteration"], "stages": seconds} for lap, seconds in zip(laps, stages, strict=True)],
        "peak_memory": peak,
        "peak_memory_reserved": peak_memory(device)[1],
        "planned": planned,
    }
    yield Row("iterations", OK, text, "", measured)
