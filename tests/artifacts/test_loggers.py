"""Loggers: what a tracker's error costs, and how a resumed run continues its page."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from PIL import Image

from solrl_lightning.artifacts.loggers import MLflow, Tracker, WandB

CALLS: dict[str, Any] = {
    "experiment": lambda tracker: tracker.experiment.add_histogram("x", 1),
    "name": lambda tracker: tracker.name,
    "version": lambda tracker: tracker.version,
    "save_dir": lambda tracker: tracker.save_dir,
    "log_metrics": lambda tracker: tracker.log_metrics({"x": 1.0}, 1),
    "log_hyperparams": lambda tracker: tracker.log_options({"seed": 1}),
    "log_graph": lambda tracker: tracker.log_graph(None),
    "save": lambda tracker: tracker.save(),
    "finalize": lambda tracker: tracker.finalize("success"),
    "after_save_checkpoint": lambda tracker: tracker.after_save_checkpoint(None),
    "watch": lambda tracker: tracker.watch(None),  # of the logger's own
}


class Lost(CSVLogger):
    """Raises in one of its methods or properties, and counts the calls of it."""

    calls = 0

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder)
        self.raises_in = name

    def watch(self, model: object) -> None:
        """As WandbLogger has."""

    def __getattribute__(self, name: str) -> Any:
        if name in CALLS and name == object.__getattribute__(self, "__dict__").get("raises_in"):
            self.calls += 1
            raise ConnectionError("no server\nin two lines")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("name", CALLS)
def test_the_first_error_of_a_logger_is_a_line_and_ends_its_logging(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = Lost(tmp_path, name)
    tracker = Tracker("mine", lost)
    with caplog.at_level(logging.WARNING):
        CALLS[name](tracker)
        for call in CALLS.values():
            call(tracker)
        tracker.log_picture("x", Image.new("RGB", (8, 8)), 1)
    message = "logger=mine failed, and logs no more; the run continues: ConnectionError: no server in two lines"
    assert caplog.messages == [message] and lost.calls == 1
    assert not list(tmp_path.rglob("*.csv"))


class Four(Logger):
    """Has what Lightning's interface asks for, and no experiment."""

    name, version = "four", 0

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((metrics, step))

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self.logged.append(params)


def test_tensorboard_s_error_has_the_reason_of_its_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.experiment.add_scalar = lambda *args: (tmp_path / "removed").read_text()  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        Tracker("tensorboard", logger).log_metrics({"x": 1.0}, 1)
    assert "the run continues: FileNotFoundError: " in caplog.text and "not supported" not in caplog.text


def test_a_logger_needs_no_experiment(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker("mine", four := Four())
    assert not hasattr(tracker, "experiment") and tracker.save_dir is None
    tracker.log_options({"seed": 1})
    tracker.log_metrics({"x": 1.0}, 2)
    tracker.finalize("success")
    assert not caplog.messages and four.logged == [{"seed": 1}, ({"x": 1.0}, 2)]


def test_folder_of_wandb_init_replaces_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    assert WandB(str(tmp_path / "run"), True, dir=str(tmp_path / "fast")).save_dir == str(tmp_path / "fast")


def test_wandb_without_a_key_is_offline_from_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its setup reads the environment, in which Lightning sets a mode later, so ``wandb.init`` is given the mode."""
    address = SimpleNamespace(settings=SimpleNamespace(base_url="https://api.wandb.ai"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(setup=lambda: address))
    modes: list[str | None] = []
    monkeypatch.setattr(WandbLogger, "__init__", lambda self, mode=None, **options: modes.append(mode))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    WandB(str(tmp_path), "auto")
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    WandB(str(tmp_path), "auto")
    assert modes == ["offline", None]


def test_mlflow_s_pictures_lie_where_the_option_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    monkeypatch.setattr(MLFlowLogger, "__init__", lambda self, **options: places.append(options["artifact_location"]))
    MLflow(str(tmp_path), None)
    MLflow(str(tmp_path), None, artifact_location="s3://bucket")
    assert places == [tmp_path.as_uri(), "s3://bucket"]


def test_mlflow_continues_the_page_of_a_resumed_run_and_tags_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    params = {"seed": "1", "iterations": "4"}
    client = SimpleNamespace(
        update_run=lambda run_id, status: events.append((run_id, status)),
        get_run=lambda run_id: SimpleNamespace(data=SimpleNamespace(params=params)),
        set_tag=lambda run_id, *tag: events.append(tag),
    )
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setattr(MLFlowLogger, "log_hyperparams", lambda self, values: events.append(values))

    def init(self: Any, run_id: str | None, **options: Any) -> None:
        self._run_id, self._initialized, self._mlflow_client = run_id or "new", True, client

    monkeypatch.setattr(MLFlowLogger, "__init__", init)
    for run_id in ("new", "7b"):
        address = "http://me:se@cret@127.0.0.1:1"  # whose password is no part of the run's folder
        MLflow(str(tmp_path), address).log_hyperparams({"seed": 1, "iterations": 7, "lr": 0.1})
        assert events == [(run_id, "RUNNING"), {"lr": 0.1}, ("iterations", "7")]
        events.clear()
        (file,) = tmp_path.iterdir()
        assert file.read_text() == f"{run_id}\nhttp://127.0.0.1:1"
        file.write_text("7b")  # of an older version
    with_login = "http://me:secret@a:1", "http://me:secret@b:1"
    for recorded, other in (
        ("http://127.0.0.1:1", None),
        ("", "http://127.0.0.1:1"),
        ("http://a:1", "http://b:1"),
        with_login,
    ):
        file.write_text(f"7b\n{recorded}")
        assert MLflow(str(tmp_path), recorded or None)._run_id == "7b"
        assert MLflow(str(tmp_path), other)._run_id == "new"


def test_wandb_continues_the_page_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    ids: list[str | None] = []

    def init(self: Any, id: str | None, **options: Any) -> None:
        ids.append(id)
        self._experiment = None

    monkeypatch.setattr(WandbLogger, "__init__", init)
    monkeypatch.setattr(WandbLogger, "experiment", property(lambda self: SimpleNamespace(id=ids[-1] or "7b")))
    monkeypatch.setattr(WandbLogger, "log_hyperparams", lambda self, values: None)
    for _ in range(2):
        WandB(str(tmp_path), True).log_hyperparams({"seed": 1})
    assert ids == [None, "7b"]
