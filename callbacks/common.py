"""What several callbacks share: typed access to loop and module, logging, and reductions over ranks.

Callbacks never touch private Lightning names: the iteration's records are read from ``trainer.fit_loop`` and everything
that a callback reports goes through ``log_values``. Shapes: P prompts of this rank, N pool, K kept.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from solrl_lightning.loop import ExploreTrainLoop
from solrl_lightning.module import SolRLModule
from solrl_lightning.rollout.stage import EXPLORE, REGENERATE

file_logger = logging.getLogger("solrl_lightning.record")
"""Goes to the run's log file only: what the terminal shows as a bar, a line or a table."""

STAGES = ("requantize", EXPLORE, REGENERATE, "train")
"""Stages of an iteration."""

EXTRA_STAGES = ("evaluate", "probe", "grid")
"""Stages that happen every few iterations: they observe training and are no part of an iteration's own time."""

C = TypeVar("C", bound=Callback)


def loop_of(trainer: Trainer) -> ExploreTrainLoop:
    return cast(ExploreTrainLoop, trainer.fit_loop)


def module_of(pl_module: LightningModule) -> SolRLModule:
    return cast(SolRLModule, pl_module)


def find_callback(trainer: Trainer, kind: type[C]) -> C | None:
    """The trainer's first callback of a kind, or None when the configuration leaves it out."""
    return next((c for c in trainer.callbacks if isinstance(c, kind)), None)  # type: ignore[attr-defined]


def log_values(pl_module: LightningModule, values: Mapping[str, float]) -> None:
    """Log at the end of an epoch, averaged over ranks; every rank has to call this with the same names."""
    for name, value in values.items():
        # batch_size=1: otherwise Lightning guesses a weight from the last micro-batch.
        pl_module.log(name, float(value), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)


class Moments(NamedTuple):
    """Number, mean and population standard deviation over all ranks; mean and std are NaN when nothing was counted."""

    samples: int
    mean: float
    std: float


def moments(trainer: Trainer, values: Tensor) -> Moments:
    """Moments of the values of all ranks, of which any may hold none. Collective: every rank has to call it."""
    values = values.detach().flatten().double()
    sums = torch.stack([torch.tensor(float(values.numel()), device=values.device), values.sum(), values.square().sum()])
    count, total, squares = reduced(trainer, sums, "sum").tolist()
    if count == 0:
        return Moments(0, float("nan"), float("nan"))
    mean = total / count
    return Moments(int(count), mean, max(squares / count - mean**2, 0.0) ** 0.5)


def reduced(trainer: Trainer, values: Tensor, operation: str) -> Tensor:
    """``values`` reduced over ranks by "sum", "min" or "max"."""
    return trainer.strategy.reduce(values.to(trainer.strategy.root_device), reduce_op=operation)
