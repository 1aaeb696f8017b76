"""Measure the time of an iteration that is spent outside the models: ``python dev/overhead.py [OVERRIDES]``.

Takes the overrides of ``task=benchmark``. A clock runs around every model: text encoders, transformer, autoencoder,
reward, backward pass, optimiser. The overhead is the rest.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from statistics import fmean, median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.artifacts.tables import format_table
from solrl_lightning.build import device_of
from solrl_lightning.callbacks.common import loop_of, module_of
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Benchmark
from solrl_lightning.sizing.timing import run_iterations
from solrl_lightning.training.stopwatch import STOPWATCH_STAGES

MODELS = ("encode", "transformer", "decode", "reward", "backward", "optimizer")


class ModelTimer(Callback):
    """Measures the computation of the models as a stage ``<stage>/<model>`` within the loop's own.

    ``laps`` has, for each iteration, the seconds of these stages and of the loop's own without them.
    """

    def __init__(self) -> None:
        self.laps: list[dict[str, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = module_of(pl_module)
        self._stopwatch = loop_of(trainer).stopwatch
        self._seconds = self._stopwatch.seconds
        methods = {"encode": "encode", "velocity": "transformer", "decode": "decode", "preview": "decode"}
        for method, model in methods.items():
            setattr(module.model, method, self._timed(model, getattr(module.model, method)))
        for reward in module.rewards.rewards.values():
            reward.unchecked = self._timed("reward", reward.unchecked)  # type: ignore[method-assign]
        module.backward = self._timed("backward", module.backward)  # type: ignore[method-assign]
        trainer.optimizers[0].register_step_post_hook(lambda *_: self._optimizer.close())

    def _model(self, name: str) -> AbstractContextManager[None]:
        return self._stopwatch.stage(f"{self._stopwatch.current}/{name}")

    def _timed(self, model: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._model(model):
                return compute(*args, **kwargs)

        return timed

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._optimizer = ExitStack()
        self._optimizer.enter_context(self._model("optimizer"))  # with gradient norm and clipping

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.laps.append(self._stopwatch.since(self._seconds))
        self._seconds = self._stopwatch.seconds


def overhead(cfg: Run, device: torch.device) -> dict[str, Any]:
    """Mean seconds of an iteration by stage and model, and the median share outside the models."""
    timer = ModelTimer()
    iterations = [lap["iteration"] for lap in run_iterations(cfg, device, timer)][1:]
    laps = [Counter(lap) for lap in timer.laps[1:]]
    stages = {}
    for stage in STOPWATCH_STAGES:
        models = {model: fmean(lap[f"{stage}/{model}"] for lap in laps) for model in MODELS}
        outside = fmean(lap[stage] for lap in laps)
        stages[stage] = {"total": outside + sum(models.values()), **models, "outside": outside}
    between = fmean(whole - sum(lap.values()) for whole, lap in zip(iterations, laps, strict=True))
    stages["between"] = {"total": between, **dict.fromkeys(MODELS, 0.0), "outside": between}
    inside = [sum(seconds for name, seconds in lap.items() if "/" in name) for lap in laps]
    return {
        "iteration": fmean(iterations),
        "stages": stages,
        "outside_share": median(1 - models / whole for models, whole in zip(inside, iterations, strict=True)),
    }


def format_overhead(result: dict[str, Any]) -> str:
    columns = ["stage", "total", *MODELS, "outside"]
    rows = [[stage, *(f"{times[column]:.3f}" for column in columns[1:])] for stage, times in result["stages"].items()]
    share = 100 * result["outside_share"]
    title = f"{share:.1f} % of an iteration of {result['iteration']:.2f} s is spent outside the models"
    return f"{title}\n{format_table(columns, rows)}"


if __name__ == "__main__":
    with ConfigTree() as tree, tempfile.TemporaryDirectory() as folder:
        config = Run.of(application_config(tree.compose(["task=benchmark", *sys.argv[1:]]), folder))
        sizes = config.task_as(Benchmark).sizes
        config.family.pool, config.family.keep = sizes.pool or config.family.pool, sizes.keep or config.family.keep
        print(format_overhead(overhead(config, device_of(config.trainer))))
