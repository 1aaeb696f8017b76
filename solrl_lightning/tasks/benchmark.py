"""task=benchmark: what a forward pass, a family's iteration, and everything around the models cost.

Three measurements, each after a warm-up and within one process, so that their ratios mean something:

1. forward    one forward pass of the transformer, BF16 and shadow, eager and compiled, taken in turn
2. families   iterations of real training, family by family and stage by stage
3. overhead   the share of an iteration of ``family=`` that is spent outside the models' own computation
"""

import platform
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig
from torch import nn

from solrl_lightning.build import build_loop, build_module, device_of, stages_of, with_option
from solrl_lightning.callbacks.requantize import Requantize
from solrl_lightning.config import check_values
from solrl_lightning.data.loaders import RankShare
from solrl_lightning.loop import ExploreTrainLoop
from solrl_lightning.module import SolRLModule, Stage
from solrl_lightning.policies import replica
from solrl_lightning.policies.compilation import can_compile, compile_blocks
from solrl_lightning.tasks.report import format_table, write_json

_WARM_UP, _FORWARDS = 3, 20  # forward passes of each variant; the first compiles
_ROLLOUT = ("requantize", "explore", "regenerate")
_STAGES = (*_ROLLOUT, "train")
_BASELINES = ("naive_scaling", "compile")
_MODELS = ("encode", "transformer", "decode", "reward", "backward", "optimizer")


def benchmark(cfg: DictConfig) -> dict[str, Any]:
    """Runs the three measurements; writes benchmark.json and prints their tables."""
    families = {name: _family(cfg, name) for name in cfg.task.families}
    device = device_of(cfg)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    result["forward"] = forward_times(cfg, device)
    print(format_forward(result["forward"]), flush=True)
    result["families"] = with_speedups({name: family_times(own, device) for name, own in families.items()})
    print(format_families(result["families"], cfg.task.repeats), flush=True)
    result["overhead"] = overhead(cfg, device)
    path = Path(cfg.run_dir) / "benchmark.json"
    write_json(path, result)
    print(f"{format_overhead(result['overhead'])}\n  {path}", flush=True)
    return result


# One forward pass


@torch.no_grad()
def forward_times(cfg: DictConfig, device: torch.device) -> dict[str, Any]:
    """Median seconds of a forward pass of ``model.rollout_batch`` candidates; the variants take turns."""
    module = build_module(cfg, device, [Stage("explore", "shadow", steps=1, solver="euler")])
    module.refresh_shadow()
    originals = {"bf16": module.replicas["merged"], "shadow": module.replicas["shadow"]}
    variants: dict[str, nn.Module] = {f"{name} eager": replica.share(own) for name, own in originals.items()}
    if cfg.task.compile and can_compile(device):
        for name, own in originals.items():
            compiled = replica.share(own)
            compile_blocks(compiled, fullgraph=name != "shadow" or module.backend.fullgraph)
            variants[f"{name} compiled"] = compiled
    batch = cfg.model.rollout_batch
    _, conditioning = module.encode(module.eval_prompts[:1]).rows(torch.zeros(batch, dtype=torch.int64))
    x, sigma = module.policy.noise(torch.arange(batch)), torch.tensor(0.5, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(_WARM_UP + _FORWARDS):
        for name, transformer in variants.items():
            start = _now(device)
            module.policy.velocity(transformer, x, sigma, conditioning)
            seconds[name].append(_now(device) - start)
    medians = {name: median(values[_WARM_UP:]) for name, values in seconds.items()}
    against = "bf16 compiled" if "bf16 compiled" in medians else "bf16 eager"
    return {
        "batch": batch,
        "precision_backend": module.precision_backend,
        "seconds": medians,
        "against": against,
        "ratios": {name: value / medians[against] for name, value in medians.items()},
    }


def format_forward(result: dict[str, Any]) -> str:
    rows = [
        [name, f"{1000 * seconds:.1f}", f"{result['ratios'][name]:.2f}"] for name, seconds in result["seconds"].items()
    ]
    shadow = result["precision_backend"]
    title = f"a forward pass of {result['batch']} candidates, median of {_FORWARDS}; the shadow is {shadow}"
    return f"{title}\n{format_table(['transformer', 'ms', 'x ' + result['against']], rows)}"


# Iterations


class Lap(NamedTuple):
    """One iteration, from the start of its epoch to the start of the next."""

    seconds: float
    stages: dict[str, float]
    models: dict[tuple[str, str], float]  # (stage, model) -> seconds in the model's own computation


class LapTimer(Callback):
    """Times iterations and, once it watches the models, their computation. Stands first among the callbacks."""

    def __init__(self, device: torch.device) -> None:
        self.laps: list[Lap] = []
        self._device = device
        self._loop: ExploreTrainLoop
        self._watches = False
        self._started: float | None = None
        self._model_started = 0.0
        self._models: dict[tuple[str, str], float] = defaultdict(float)

    def watch(self, module: SolRLModule) -> None:
        """Measures encoding, transformer, decoding and reward; backward and optimiser have hooks of their own."""
        self._watches = True
        for method, model in (("encode", "encode"), ("velocity", "transformer"), ("decode", "decode")):
            setattr(module.policy, method, self._timed(model, getattr(module.policy, method)))
        rewards: dict[str, Any] = module.rewards.rewards
        for name, reward in rewards.items():
            rewards[name] = self._timed("reward", reward)

    def _timed(self, model: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            result = compute(*args, **kwargs)
            self._end(model)
            return result

        return timed

    def _begin(self) -> None:
        if self._watches:
            self._model_started = _now(self._device)

    def _end(self, model: str) -> None:
        if self._watches:
            self._models[self._loop.stopwatch.current, model] += _now(self._device) - self._model_started

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.fit_loop, ExploreTrainLoop)
        self._loop = trainer.fit_loop
        trainer.optimizers[0].register_step_post_hook(lambda *_: self._end("optimizer"))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._lap()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._lap()

    def on_before_backward(self, *args: Any) -> None:
        self._begin()

    def on_after_backward(self, *args: Any) -> None:
        self._end("backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._begin()  # ahead of gradient norm and clipping

    def _lap(self) -> None:
        now = _now(self._device)
        if self._started is not None:
            self.laps.append(Lap(now - self._started, self._loop.stopwatch.seconds, self._models))
        self._loop.stopwatch.reset()
        self._models = defaultdict(float)
        self._started = now


def run_iterations(cfg: DictConfig, device: torch.device, watch: bool) -> list[Lap]:
    """Trains for ``task.repeats`` iterations after one of warm-up, with nothing around them but the re-quantisation."""
    torch.compiler.reset()  # a family compiles for itself
    timer = LapTimer(device)
    trainer: Trainer = instantiate(
        cfg.trainer,
        logger=False,
        callbacks=[timer, Requantize()],
        max_epochs=1 + cfg.task.repeats,
        devices=1,
        num_nodes=1,
        strategy="auto",
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = build_module(cfg, device, stages_of(cfg))
    if watch:
        timer.watch(module)
    loop = build_loop(cfg, trainer)
    trainer.fit(module, loop.loader, RankShare([], 0, 1))
    return timer.laps[1:]


def family_times(cfg: DictConfig, device: torch.device) -> dict[str, Any]:
    """Median seconds of an iteration of ``cfg.family`` and of its stages; a stage that it lacks takes none."""
    laps = run_iterations(cfg, device, watch=False)
    stages = {stage: median(lap.stages.get(stage, 0.0) for lap in laps) for stage in _STAGES}
    rollout = median(sum(lap.stages.get(stage, 0.0) for stage in _ROLLOUT) for lap in laps)
    iteration = median(lap.seconds for lap in laps)
    return {"pool": cfg.family.pool, "keep": cfg.family.keep, **stages, "rollout": rollout, "iteration": iteration}


def with_speedups(families: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How many times faster than each baseline a family rolls out."""
    baselines = {name: families[name]["rollout"] for name in _BASELINES if name in families}
    return {
        name: times | {"speedup": {baseline: seconds / times["rollout"] for baseline, seconds in baselines.items()}}
        for name, times in families.items()
    }


def format_families(families: dict[str, dict[str, Any]], repeats: int) -> str:
    baselines = list(next(iter(families.values()))["speedup"])
    columns = ["family", "kept", *_STAGES, "rollout", "iteration", *(f"x {name}" for name in baselines)]
    rows = [
        [
            name,
            f"{times['keep']}-in-{times['pool']}",
            *(f"{times[stage]:.2f}" for stage in (*_STAGES, "rollout", "iteration")),
            *(f"{times['speedup'][baseline]:.2f}" for baseline in baselines),
        ]
        for name, times in families.items()
    ]
    title = f"seconds per iteration, median of {repeats}; rollout is {' + '.join(_ROLLOUT)}; x times faster than"
    return f"{title}\n{format_table(columns, rows)}"


def overhead(cfg: DictConfig, device: torch.device) -> dict[str, Any]:
    """Where an iteration's seconds are spent (means), and the share outside the models (median over iterations)."""
    laps = run_iterations(cfg, device, watch=True)
    stages: dict[str, dict[str, float]] = {}
    for stage in _STAGES:
        total = sum(lap.stages.get(stage, 0.0) for lap in laps) / len(laps)
        models = {model: sum(lap.models.get((stage, model), 0.0) for lap in laps) / len(laps) for model in _MODELS}
        stages[stage] = {"total": total, **models, "outside": total - sum(models.values())}
    between = sum(lap.seconds - sum(lap.stages.values()) for lap in laps) / len(laps)
    stages["between"] = {"total": between, **dict.fromkeys(_MODELS, 0.0), "outside": between}
    return {
        "iteration": sum(lap.seconds for lap in laps) / len(laps),
        "stages": stages,
        "outside_share": median(1 - sum(lap.models.values()) / lap.seconds for lap in laps),
    }


def format_overhead(result: dict[str, Any]) -> str:
    columns = ["stage", "total", *_MODELS, "outside"]
    rows = [[stage, *(f"{times[column]:.3f}" for column in columns[1:])] for stage, times in result["stages"].items()]
    share = 100 * result["outside_share"]
    title = f"{share:.1f} % of an iteration of {result['iteration']:.2f} s is spent outside the models"
    return f"{title}\n{format_table(columns, rows)}"


def _family(cfg: DictConfig, name: str) -> DictConfig:
    """The configuration with another family, of the sizes that ``task.sizes`` asks for."""
    changed = with_option(cfg, "family", name)
    changed.family.update({key: value for key, value in cfg.task.sizes.items() if value is not None})
    check_values(changed)
    return changed


def _now(device: torch.device) -> float:
    """Seconds, when everything that was launched before is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
