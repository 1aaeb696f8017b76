"""TensorBoard without Lightning's scalar `epoch`, a second number of the iteration that starts at 0."""

from collections.abc import Mapping

from lightning.pytorch.loggers import TensorBoardLogger


class TensorBoard(TensorBoardLogger):
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)
