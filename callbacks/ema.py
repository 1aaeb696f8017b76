"""Exponential moving average of the trained weights. Evaluation and export use it.

Its decay is as in DiffusionNFT's published code (train_nft_sd3.py). A checkpoint holds the average in the callback's
state, not in the module's.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from solrl_lightning.callbacks.common import module_of
from solrl_lightning.errors import UserError
from solrl_lightning.policies.lora import State
from solrl_lightning.training.schedules import ema_decay
from solrl_lightning.training.shards import shard_like

log = logging.getLogger(__name__)


@torch.no_grad()
def update_average(average: dict[str, Tensor], current: dict[str, Tensor], decay: float) -> None:
    """Update in place: average <- decay * average + (1 - decay) * current. ``average`` is float32."""
    for name, value in current.items():
        average[name].lerp_(value.detach().to(average[name]), 1.0 - decay)


class WeightEMA(Callback):
    """Averages the weights "default" after every optimiser step and assigns the average to ``module.ema_state``."""

    def __init__(self) -> None:
        self.updates = 0  # optimiser steps in the average
        self.average: dict[str, Tensor] = {}  # name -> float32; later steps change it in place

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = module_of(pl_module)
        current = module.policy_state("default")
        if self.average:
            self.average = {name: shard_like(value, current[name]) for name, value in self.average.items()}
            # A checkpoint saved between the optimiser step and on_train_batch_end lacks this update. It holds the
            # weights after the step, so the update here is exact.
            self._catch_up(trainer, pl_module)
        else:
            self.average = {name: value.detach().float().clone() for name, value in current.items()}
            self.updates = trainer.global_step
            if trainer.global_step:
                log.warning("the checkpoint has no evaluation average (callbacks.ema): it begins at its weights")
        module.ema_state = self.average

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._catch_up(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.average:  # a checkpoint was loaded for an evaluation without training
            module_of(pl_module).ema_state = self.average

    def _catch_up(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.updates < trainer.global_step:
            current = module_of(pl_module).policy_state("default")
            update_average(self.average, current, ema_decay(trainer.global_step))
            self.updates = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates, self.average = state_dict["updates"], dict(state_dict["average"])


def average_in(checkpoint: Mapping[str, Any], trained: State) -> State | None:
    """Return the evaluation average of a checkpoint, or None if it was saved without this callback.

    Raises:
        UserError: its names and shapes are not as in ``trained``.
    """
    state = checkpoint["callbacks"].get(WeightEMA.__qualname__, {"average": {}})
    average = state.get("average") if isinstance(state, dict) else None
    shapes = {name: value.shape for name, value in trained.items()}
    known = isinstance(average, dict) and {name: getattr(value, "shape", None) for name, value in average.items()}
    if known not in ({}, shapes):
        raise UserError("the evaluation average of the checkpoint does not fit its weights. Take another one.")
    return average or None
