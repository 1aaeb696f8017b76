"""Lightning's EarlyStopping in runs that resume."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer, callbacks

from solrl_lightning.errors import UserError, did_you_mean, nearest


class EarlyStopping(callbacks.EarlyStopping):
    """Ends a run whose metric has not improved in ``patience`` evaluations, also if a resume changes ``patience``.

    Lightning takes it from the checkpoint, and looks for the metric after the first evaluation in training only.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = sorted(trainer.callback_metrics)
        if trainer.state.fn == "validate" and not self._check_on_train_epoch_end and self.monitor not in metrics:
            raise UserError(
                f"callbacks.early_stopping.monitor={self.monitor} is invalid: it must be a metric of evaluations."
                f"{did_you_mean(nearest(self.monitor, metrics))} They are {', '.join(metrics)}."
            )
        super().on_validation_end(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
