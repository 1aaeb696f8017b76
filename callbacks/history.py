"""Keeps what each iteration logs, for the curves of report.html."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.callbacks.common import loop_of

_ROWS = 1000  # limits the size of the checkpoint


class MetricHistory(Callback):
    """One row per iteration: its number and every logged value, by tag. The checkpoint holds the rows.

    Beyond 1000 rows every second one is dropped. ``build_trainer`` puts this callback behind those that log.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Collective: the values are reduced over ranks here.
        values = {name: float(value) for name, value in loop_of(trainer).logged_values().items()}
        self.rows.append({"iteration": trainer.current_epoch + 1} | values)
        if len(self.rows) > _ROWS:
            self.rows = self.rows[1::2]

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])
