"""Fixtures for the whole suite: configurations composed as a run gets them, and the command line in this process."""

import atexit
import functools
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import once
import pytest
from forks import Forks
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from solrl_lightning.__main__ import main
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.cli.sweep_job import RANK_VARIABLES
from solrl_lightning.options.run import Run
from solrl_lightning.study.drawing import draw_chart

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:  # whose libraries take up to ten seconds to be taken down, for which the suite waits
    atexit.register(os._exit, 0)  # the first one, which is called last
gc.set_threshold(*once.RARELY)
# Threads wait for each other more than they compute at these sizes. Else Lightning sets two, which later tests inherit.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # processes for the few kernels compiled here would import torch
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # to try the vector instructions, one would import torch, too


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Puts the tests that fork together: one process of the suite starts it for all."""
    items.sort(key=lambda item: "forks" not in item.fixturenames)


def pytest_collection_finish() -> None:
    """In the processes that run tests; the one that starts them needs no torch."""
    # pytest adds a handler to loggers that do not propagate; with one, torch.compile formats thousands of records.
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()  # a tenth of the time was garbage collection among what the libraries keep


def pytest_sessionfinish() -> None:
    if not IS_WORKER:
        gc.unfreeze()  # else nanobind reports leaks


@pytest.fixture(scope="session", autouse=True)
def what_runs_repeat_is_done_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        once.compose_once(patch)
        once.compose_in_less_time(patch)
        once.draw_once(patch)
        once.try_out_once(patch)
        yield


@pytest.fixture
def drawn_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each chart of a report."""
    monkeypatch.setattr("solrl_lightning.study.report.draw_chart", draw_chart)


@pytest.fixture(scope="session", autouse=True)
def runs_are_recorded_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def a_test_leaves_no_ranks() -> Iterator[None]:
    """Lightning leaves the variables of its ranks in the environment, where a later test would be one of them."""
    before = os.environ.keys() & RANK_VARIABLES
    yield
    for name in RANK_VARIABLES - before:
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Runs commands in processes of their own that can be killed, without the seconds of their imports."""
    with Forks() as process:
        yield process


class Finished(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


@functools.cache
def _composed(*arguments: str) -> DictConfig:
    with ConfigTree() as tree:
        return tree.compose(tree.completed(arguments))


@pytest.fixture
def compose(tmp_path: Path) -> Callable[..., Run]:
    """compose("family=compile", "seed=1") are the options of such a run in ``tmp_path``."""

    def composed(*arguments: str) -> Run:
        return Run.of(application_config(_composed(*arguments), tmp_path))

    return composed


@pytest.fixture
def command(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., Finished]]:
    """command("iterations=2") is `python -m solrl_lightning iterations=2` in the folder ``tmp_path``."""
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["solrl_lightning"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # main sets both for its process
    monkeypatch.setattr(logging, "raiseExceptions", logging.raiseExceptions)
    loggers = (None, "lightning", "solrl_lightning.record")  # which write the log file of a run
    root, *others = map(logging.getLogger, loggers)
    handlers, level, dtype = list(root.handlers), root.level, torch.get_default_dtype()

    def finished(*arguments: str) -> Finished:
        capfd.readouterr()
        try:
            status = main(list(arguments))
        except SystemExit as exit:
            status = exit.code if isinstance(exit.code, int) else 1
        return Finished(status, *capfd.readouterr())

    yield finished
    for handler in {handler for logger in (root, *others) for handler in logger.handlers} - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    for logger in others:
        logger.handlers.clear()
        logger.propagate = True
    torch.set_default_dtype(dtype)  # transformers leaves that of a model which it failed to make
    HydraConfig.instance().cfg = None
