"""TensorBoard without Lightning's scalar `epoch`, a second number of the iteration that starts at 0."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter


class TensorBoard(TensorBoardLogger):
    """Raises TypeError for a key of ``options`` that neither Lightning's logger nor torch's writer takes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        signature(SummaryWriter).bind(**self._kwargs)  # Lightning makes the writer when a run has started

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)
