"""TensorBoard logger without Lightning's scalar `epoch`, which counts iterations from 0."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter


class TensorBoard(TensorBoardLogger):
    """Lightning's TensorBoardLogger; raises TypeError for an option that torch's writer does not accept."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        signature(SummaryWriter).bind(**self._kwargs)  # Lightning creates the writer later, during the run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)
