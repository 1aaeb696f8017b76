"""Lightning's loggers as this application uses them, and `Tracker`, which keeps their errors from a run.

All of them log at the number of the iteration, and without Lightning's scalar `epoch`, which counts iterations from 0.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from solrl_lightning.artifacts.files import write_atomically

log = logging.getLogger(__name__)
file_logger = logging.getLogger("solrl_lightning.record")
T = TypeVar("T")
_SHOWN = 400  # characters of an error
_RUN_ID = ".run_id"  # hidden, so that `wandb sync <run>/wandb/*` leaves it out


def _value(name: str) -> Any:
    """Return the property of `Tracker` that reads the logger's ``name``."""
    return property(lambda tracker: tracker.attempt(lambda: getattr(tracker.logger, name), None))


def _method(name: str) -> Any:
    """Return the method of `Tracker` that calls the logger's ``name``."""
    return lambda tracker, *a, **kw: tracker.attempt(lambda: getattr(tracker.logger, name)(*a, **kw), None)


class Tracker(Logger):
    """A logger whose errors cost nothing of a run: the first one is printed in a line, and ends the logging.

    Every call of the logger passes `attempt`. What this class does not define is an attribute of the logger.

    Args:
        key: name below ``logger`` in the configuration.
        logger: of Lightning, or with its interface.
    """

    def __init__(self, key: str, logger: Logger) -> None:
        super().__init__()
        self.key, self.logger, self.has_failed = key, logger, False

    def attempt(self, action: Callable[[], T], otherwise: T) -> T:
        """Return what ``action`` returns; ``otherwise`` if it raises, and if an action has raised before."""
        if self.has_failed:
            return otherwise
        try:
            return action()
        except Exception as error:
            self.has_failed = True
            file_logger.info("the error of logger=%s", self.key, exc_info=True)
            if isinstance(error, ValueError) and isinstance(error.__cause__, Exception):
                error = error.__cause__  # Lightning's TensorBoardLogger takes every error for one of the value
            log.warning(
                "logger=%s failed, and logs no more; the run continues: %s: %s",
                *(self.key, type(error).__name__, shorten(str(error), _SHOWN)),  # MLflow's first line has no reason
            )
            return otherwise

    def __getattr__(self, name: str) -> Any:
        if name == "logger" or name not in dir(self.logger):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        value = self.attempt(lambda: getattr(self.logger, name), lambda *args, **options: None)
        return (lambda *a, **kw: self.attempt(partial(value, *a, **kw), None)) if callable(value) else value

    @property
    def experiment(self) -> Any:
        if "experiment" not in dir(self.logger):  # no method of Lightning's interface, which asks with hasattr
            return self.__getattr__("experiment")
        return self.attempt(lambda: cast(Any, self.logger).experiment, DummyExperiment())

    name = _value("name")
    version = _value("version")
    save_dir = _value("save_dir")
    log_metrics = _method("log_metrics")
    log_hyperparams = _method("log_hyperparams")
    log_graph = _method("log_graph")
    save = _method("save")
    finalize = _method("finalize")
    after_save_checkpoint = _method("after_save_checkpoint")

    def log_picture(self, name: str, picture: Image.Image, step: int) -> None:
        """Log a picture to TensorBoard, Weights & Biases or MLflow; another logger takes none."""
        self.attempt(partial(_log_picture, self.logger, name, picture, step), None)

    def log_options(self, options: Mapping[str, Any]) -> None:
        """Log the options of a run when it starts; to TensorBoard `log_results` does, as it takes both together."""
        if not isinstance(self.logger, TensorBoardLogger):
            self.log_hyperparams(dict(options))

    def log_results(self, options: Mapping[str, Any], results: Mapping[str, float], step: int) -> None:
        """Log a row of TensorBoard's HParams table."""
        if isinstance(self.logger, TensorBoardLogger):
            self.log_hyperparams(dict(options), dict(results), step=step)


def trackers_of(trainer: Trainer) -> list[Tracker]:
    """Return the loggers of a trainer of `build.build_trainer`."""
    return cast(list[Tracker], trainer.loggers)


class _Iterations(Logger):
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        without = {name: value for name, value in metrics.items() if name != "epoch"}
        super().log_metrics(without, step)  # type: ignore[safe-super]


class TensorBoard(_Iterations, TensorBoardLogger):
    """Lightning's TensorBoardLogger; raises TypeError for an option that torch's writer does not accept."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        signature(SummaryWriter).bind(log_dir="", **self._kwargs)  # Lightning creates the writer later, during the run


class CSV(_Iterations, CSVLogger):
    """Lightning's CSVLogger."""


def keep_earlier_file(logger: Logger) -> None:
    """Let a CSVLogger write another ``version_<n>`` where its folder has a file, which Lightning would delete."""
    if isinstance(logger, CSVLogger) and Path(logger.log_dir, ExperimentWriter.NAME_METRICS_FILE).exists():
        logger._version = None


class WandB(_Iterations, WandbLogger):
    """Lightning's WandbLogger. A run that resumes in its folder continues its page: the id is in wandb/.run_id there.

    Args:
        save_dir: folder of its files.
        offline: true, false, or auto: keep the run on this machine if there is no key.
        options: arguments of Lightning's logger and of ``wandb.init``, whose ``dir`` replaces ``save_dir``.
    """

    def __init__(self, save_dir: str, offline: bool | str, **options: Any) -> None:
        save_dir = options.pop("dir", save_dir)  # Lightning's logger would leave it out
        if offline == "auto":  # WANDB_MODE also says where a run stays
            import wandb

            keep = "WANDB_MODE" not in os.environ and not has_wandb_key(wandb.setup().settings.base_url)
            if keep:  # setup has read the environment, in which Lightning would set the mode
                options = {"mode": "offline"} | options
                place = f"{save_dir}/wandb/*"
                log.info("logger=wandb: there is no key, so the run stays here; upload it with wandb sync %s", place)
        else:
            keep = bool(offline)
        Path(save_dir).mkdir(parents=True, exist_ok=True)  # wandb takes the system's temporary folder if there is none
        self._id_file = Path(save_dir) / "wandb" / _RUN_ID
        super().__init__(save_dir=save_dir, offline=keep, **({"id": _read_id(self._id_file)} | options))

    @property
    def experiment(self) -> Any:
        import wandb

        if self._experiment is None and wandb.run is not None:  # of an earlier job of this process, which wandb.init
            wandb.finish()  # would return
        return super().experiment

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        write_atomically(self._id_file, self.experiment.id.encode())
        super().log_hyperparams(params)


def has_wandb_key(address: str) -> bool:
    """Return whether WANDB_API_KEY is set, or the netrc file of ``wandb login`` has a key for ``address``."""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    machine = f"machine {urlsplit(address).hostname}"
    return bool(os.environ.get("WANDB_API_KEY")) or (file.is_file() and machine in file.read_text())


class MLflow(_Iterations, MLFlowLogger):
    """Lightning's MLFlowLogger. A run that resumes in its folder continues its page: the id is in mlflow/.run_id there.

    With another tracking_uri it begins a page there.

    Args:
        save_dir: folder of the id and, without a tracking_uri, of the database and of the pictures.
        tracking_uri: address of a server, or None.
        options: arguments of Lightning's logger.
    """

    def __init__(self, save_dir: str, tracking_uri: str | None, **options: Any) -> None:
        self._recorded = _without_login(tracking_uri or "")  # with the id, as another server does not have the page
        if tracking_uri is None:  # newer versions of MLflow refuse Lightning's default, a folder of files
            folder = Path(save_dir).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            tracking_uri = f"sqlite:///{folder}/mlflow.db"
            options = {"artifact_location": folder.as_uri()} | options
        # By default a run waits 4 minutes for a server that is gone and 16 for one that hangs; so 14 s, or 54.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self._id_file = Path(save_dir) / _RUN_ID
        run_id, has_uri, recorded = (_read_id(self._id_file) or "").partition("\n")
        same = _without_login(recorded) == self._recorded or not has_uri  # which an older version has not recorded
        super().__init__(tracking_uri=tracking_uri, **({"run_id": run_id if run_id and same else None} | options))

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Log parameters; of a resumed run, one with another value as a tag, because MLflow keeps the first value."""
        client, run_id = self.experiment, self.run_id
        write_atomically(self._id_file, f"{run_id}\n{self._recorded}".encode())
        client.update_run(run_id, status="RUNNING")  # which the end of a run, and of its first evaluation, has changed
        logged = client.get_run(run_id).data.params
        super().log_hyperparams({name: value for name, value in params.items() if name not in logged})
        for name, value in params.items():
            if logged.get(name, str(value)) != str(value):
                client.set_tag(run_id, name, str(value))


def _without_login(address: str) -> str:
    """Return an address without a name and a password before its host."""
    return re.sub("//[^/]*@", "//", address)


def _read_id(file: Path) -> str | None:
    return file.read_text() if file.is_file() else None


def _log_picture(logger: Logger, name: str, picture: Image.Image, step: int) -> None:
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_image(name, np.asarray(picture), step, dataformats="HWC")
    elif isinstance(logger, WandbLogger):
        logger.log_image(key=name, images=[picture], step=step)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_image(logger.run_id, picture, key=name, step=step)
