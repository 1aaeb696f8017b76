"""Functions that several callbacks use: typed access to loop and module, logging, and reductions over ranks."""

import logging
from collections.abc import Mapping
from typing import NamedTuple, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from torch import Tensor

from solrl_lightning.training.loop import ExploreTrainLoop
from solrl_lightning.training.module import SolRLModule

file_logger = logging.getLogger("solrl_lightning.record")
"""Writes to the run's log file only. Use it for text that the terminal shows as a bar, a line or a table."""

EXTRA_STAGES = ("evaluate", "probe", "grid", "checkpoint")
"""Stages of some iterations that only observe training. ``time/iteration`` excludes them."""

_EARLY_STOPPING = {
    EarlyStoppingReason.PATIENCE_EXHAUSTED: "did not improve in {0.wait_count} evaluations",
    EarlyStoppingReason.STOPPING_THRESHOLD: "reached {0.stopping_threshold}",
    EarlyStoppingReason.DIVERGENCE_THRESHOLD: "became worse than {0.divergence_threshold}",
    EarlyStoppingReason.NON_FINITE_METRIC: "was not finite",
}

C = TypeVar("C", bound=Callback)


def loop_of(trainer: Trainer) -> ExploreTrainLoop:
    return cast(ExploreTrainLoop, trainer.fit_loop)


def module_of(pl_module: LightningModule) -> SolRLModule:
    return cast(SolRLModule, pl_module)


def find_callback(trainer: Trainer, kind: type[C]) -> C | None:
    """Return the trainer's first callback of a class, or None if the configuration has none."""
    return next((c for c in trainer.callbacks if isinstance(c, kind)), None)  # type: ignore[attr-defined]


def stop_reason(trainer: Trainer) -> str | None:
    """Return why ``Guard`` or Lightning's EarlyStopping has ended the run; None if neither has."""
    if not trainer.should_stop:
        return None
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and callback.stopping_reason in _EARLY_STOPPING:
            if callback.stopped_epoch + 1 == loop_of(trainer).iterations_done:  # not of the run that this one resumes
                reason = _EARLY_STOPPING[callback.stopping_reason].format(callback)
                return f"early stopping: {callback.monitor} {reason}"
        if (alarm := getattr(callback, "stopped_by", None)) is not None:
            return f"the guard: {alarm.name}"
    return None


def log_values(pl_module: LightningModule, values: Mapping[str, float]) -> None:
    """Log values as means over ranks at the end of the epoch. Collective: every rank must pass the same names."""
    # Without batch_size Lightning weights the values by the size of the last micro-batch.
    pl_module.log_dict(dict(values), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)


class Moments(NamedTuple):
    """Number, mean and population standard deviation of values of all ranks; mean and std of no values are NaN."""

    samples: int
    mean: float
    std: float


def moments(trainer: Trainer, values: Tensor) -> Moments:
    """Return the moments of the values of all ranks. Collective: ranks without values pass an empty tensor."""
    values = values.detach().flatten().double()
    sums = torch.stack([torch.ones_like(values).sum(), values.sum(), values.square().sum()])
    count, total, squares = reduced(trainer, sums, "sum").tolist()
    if count == 0:
        return Moments(0, float("nan"), float("nan"))
    mean = total / count
    return Moments(int(count), mean, max(squares / count - mean**2, 0.0) ** 0.5)


def reduced(trainer: Trainer, values: Tensor, operation: str) -> Tensor:
    """Return ``values`` reduced over ranks by "sum", "min" or "max". Collective."""
    return trainer.strategy.reduce(values.to(trainer.strategy.root_device), reduce_op=operation)
