"""Lightning's loggers as this application uses them, and pictures for each.

All of them log at the number of the iteration, and without Lightning's scalar `epoch`, which counts iterations from 0.
"""

import logging
import os
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from solrl_lightning.errors import UserError

log = logging.getLogger(__name__)


class _Iterations(Logger):
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        without = {name: value for name, value in metrics.items() if name != "epoch"}
        super().log_metrics(without, step)  # type: ignore[safe-super]


class TensorBoard(_Iterations, TensorBoardLogger):
    """Lightning's TensorBoardLogger; raises TypeError for an option that torch's writer does not accept."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        signature(SummaryWriter).bind(**self._kwargs)  # Lightning creates the writer later, during the run


class CSV(_Iterations, CSVLogger):
    """Lightning's CSVLogger. A resumed run writes another ``version_<n>``, because Lightning deletes an old file."""


class WandB(_Iterations, WandbLogger):
    """Lightning's WandbLogger.

    Args:
        save_dir: folder of its files.
        offline: true, false, or auto: keep the run on this machine if there is no key.
        options: arguments of Lightning's logger and of ``wandb.init``.

    Raises:
        UserError: wandb is not installed.
    """

    def __init__(self, save_dir: str, offline: bool | str, **options: Any) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise not_installed("wandb") from error
        keep = not has_wandb_key() if offline == "auto" else bool(offline)
        if keep and offline == "auto":
            log.info(
                "logger=wandb: there is no key, so the run stays here; upload it with wandb sync %s/wandb/*", save_dir
            )
        if wandb.run is not None:  # an earlier job of this process: wandb.init would return its run
            wandb.finish()
        Path(save_dir).mkdir(parents=True, exist_ok=True)  # wandb takes the system's temporary folder if there is none
        super().__init__(save_dir=save_dir, offline=keep, **options)


def has_wandb_key() -> bool:
    """Whether there is a key in WANDB_API_KEY, or in the netrc file, where ``wandb login`` keeps it."""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    return bool(os.environ.get("WANDB_API_KEY")) or (file.is_file() and f"machine {host}" in file.read_text())


class MLflow(_Iterations, MLFlowLogger):
    """Lightning's MLFlowLogger.

    Args:
        save_dir: folder of the database and of the pictures; unused with a tracking_uri.
        tracking_uri: address of a server, or None.
        options: arguments of Lightning's logger.

    Raises:
        UserError: mlflow is not installed.
    """

    def __init__(self, save_dir: str, tracking_uri: str | None, **options: Any) -> None:
        try:
            import mlflow  # noqa: F401
        except ModuleNotFoundError as error:
            raise not_installed("mlflow") from error
        if tracking_uri is None:  # newer versions of MLflow refuse Lightning's default, a folder of files
            folder = Path(save_dir).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            tracking_uri, options["artifact_location"] = f"sqlite:///{folder}/mlflow.db", folder.as_uri()
        super().__init__(tracking_uri=tracking_uri, **options)


def not_installed(name: str) -> UserError:
    return UserError(
        f"logger={name} is invalid: the package {name} is not installed. Install it with pip install {name}, or leave "
        "it out."
    )


def log_picture(logger: Logger, name: str, picture: Image.Image, step: int) -> None:
    """Log a picture to TensorBoard, Weights & Biases or MLflow; another logger takes none."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_image(name, np.asarray(picture), step, dataformats="HWC")
    elif isinstance(logger, WandbLogger):
        logger.log_image(key=name, images=[picture], step=step)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_image(logger.run_id, picture, key=name, step=step)
