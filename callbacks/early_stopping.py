"""Lightning's EarlyStopping in runs that resume."""

import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks

from solrl_lightning.artifacts.run_folder import LAST
from solrl_lightning.callbacks.common import module_of
from solrl_lightning.errors import UserError, did_you_mean, nearest

log = logging.getLogger(__name__)


class EarlyStopping(callbacks.EarlyStopping):
    """Ends a run whose metric has not improved in ``patience`` evaluations, also if a resume changes ``patience``.

    Lightning takes ``patience`` from the checkpoint, and looks for the metric after the first evaluation in training
    only. A branch counts from its own first evaluation, as its ``best.ckpt`` begins anew.
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        evaluation = module_of(pl_module).evaluation
        if self.monitor.startswith("eval/"):  # others may be of a user's callback
            self._check_monitor(
                trainer, [f"eval/{name}" for name in (*evaluation.names, *evaluation.rewards.part_names)]
            )
            reward = self.monitor.removeprefix("eval/")
            if trainer.state.fn == "validate" and evaluation.rewards.sign(reward) < 0 and self.mode == "max":
                log.warning(
                    "less of %s is better, by its weight: callbacks.early_stopping.mode=min stops by that", reward
                )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_monitor(trainer, sorted(trainer.callback_metrics))
        super().on_validation_end(trainer, pl_module)

    def _check_monitor(self, trainer: Trainer, metrics: Collection[str]) -> None:
        """Raise UserError if none of the ``metrics`` of the evaluation before training is monitored."""
        if trainer.state.fn == "validate" and not self._check_on_train_epoch_end and self.monitor not in metrics:
            raise UserError(
                f"callbacks.early_stopping.monitor={self.monitor} is invalid: it must be a metric of evaluations."
                f"{did_you_mean(nearest(self.monitor, metrics))} They are {', '.join(metrics)}."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.strategy.broadcast((Path(trainer.default_root_dir) / LAST).is_file()):
            self.wait_count, self.best_score = 0, torch.tensor(math.inf if self.monitor_op == torch.lt else -math.inf)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
