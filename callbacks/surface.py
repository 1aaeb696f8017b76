"""What the callbacks use of the loop and the module, written as types, and the few steps that several of them share.

Callbacks never touch private Lightning names: the iteration's records are read from ``trainer.fit_loop`` and everything
that a callback reports goes through ``log_values``. Shapes: P prompts of this rank, N pool, K kept.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.records import Candidates, Rollouts
from solrl_lightning.stopwatch import Stopwatch

RECORD = logging.getLogger("solrl_lightning.record")
"""Goes to the run's log file only: what the terminal shows as a bar, a line or a table."""

EXTRA_STAGES = ("evaluate", "probe", "grid")
"""Stages that happen every few iterations: they observe training and are no part of an iteration's own time."""

C = TypeVar("C", bound=Callback)


class Loop(Protocol):
    """The part of ``ExploreTrainLoop`` that callbacks use."""

    stopwatch: Stopwatch
    rollouts: Rollouts
    explored: Candidates | None  # None in families of one stage, on every rank alike

    def regenerate(self, prompts: list[str], seeds: Tensor) -> Candidates: ...  # seeds [P, n]


class Policy(Protocol):
    """The part of a policy that callbacks use."""

    def decode(self, x: Tensor) -> Tensor: ...  # latents [B, ...] -> images [B, 3, H, W] in [0, 1]


class Module(Protocol):
    """The part of ``SolRLModule`` that callbacks use."""

    policy: Policy
    rewards: WeightedRewards
    precision_backend: object
    eval_history: list[dict[str, Any]]
    eval_prompts: list[str]
    ema_state: dict[str, Tensor] | None
    device: torch.device

    def refresh_shadow(self) -> None: ...

    def adapter_state(self, name: str) -> dict[str, Tensor]: ...

    def sample(self, prompts: list[str], seeds: Tensor, *, weights: str, steps: int) -> Tensor: ...

    def save_lora(self, folder: Path, weights: str) -> None: ...


def loop_of(trainer: Trainer) -> Loop:
    return cast(Loop, trainer.fit_loop)


def module_of(pl_module: LightningModule) -> Module:
    return cast(Module, pl_module)


def find(trainer: Trainer, kind: type[C]) -> C | None:
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
