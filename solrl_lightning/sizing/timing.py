"""Seconds and memory of work on a device: calls that alternate, and iterations of training by stage."""

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.pytorch import Callback, Trainer

from solrl_lightning.build import build_training
from solrl_lightning.callbacks.requantize import Requantize
from solrl_lightning.callbacks.timings import StageTimings
from solrl_lightning.data.loaders import RankPrompts
from solrl_lightning.machine.memory import peak_memory
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Benchmark
from solrl_lightning.options.trainer import named_devices
from solrl_lightning.run_prompts import prompt_sets

_ROUNDS, _SECONDS = 20, 0.5  # of ``least_seconds``: maximum number of timed calls, and when no call starts any more

Lap = Mapping[str, float]  # seconds of STOPWATCH_STAGES, 0 for one that did not run, and of the whole "iteration"


def alternate(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int, limit: float = math.inf
) -> dict[str, list[float]]:
    """Return the seconds of each call, round by round, so that a disturbance affects all calls.

    limit: seconds after which no round but the first three begins.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        if number > 2 and sum(map(sum, seconds.values())) > limit:
            break
        for name, call in calls.items():
            start = _now(device)
            call()
            seconds[name].append(_now(device) - start)
    return seconds


def least_seconds(calls: Mapping[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Return the minimum seconds of each call, without its first. Other load can only increase a time."""
    seconds = alternate(calls, device, 1 + _ROUNDS, limit=_SECONDS)
    return {name: min(values[1:]) for name, values in seconds.items()}


def format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def run_iterations(cfg: Run, device: torch.device, *observers: Callback) -> list[Lap]:
    """Run an iteration of warm-up and ``task.repeats`` others, with requantisation and the observers as callbacks."""
    release(device)
    timings = StageTimings()
    trainer: Trainer = instantiate(
        cfg.trainer,
        logger=False,
        callbacks=[*observers, timings, Requantize()],
        max_epochs=1 + cfg.task_as(Benchmark).repeats,
        devices=named_devices(cfg.trainer)[:1] or 1,
        num_nodes=1,
        strategy="auto",
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module, loop = build_training(cfg, prompt_sets(cfg), trainer)
    trainer.fit(module, loop.loader, RankPrompts([], 0, 1))
    return list(timings.history)


def peak_since_release(device: torch.device) -> dict[str, Any]:
    """Return the most bytes of tensors on a GPU since ``release``, or of the process on a CPU so far."""
    return {"bytes": peak_memory(device)[0], "of": "the family" if device.type == "cuda" else "the process so far"}


def release(device: torch.device) -> None:
    """Free memory and compiled code of the previous measurement."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _now(device: torch.device) -> float:
    """Return the seconds on the clock after all launched work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
