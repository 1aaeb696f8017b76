"""Lightning's EarlyStopping in runs that resume."""

from typing import Any

from lightning.pytorch import callbacks


class EarlyStopping(callbacks.EarlyStopping):
    """Ends a run whose metric has not improved in ``patience`` evaluations, also if a resume changes ``patience``.

    Lightning takes it from the checkpoint.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
