"""Fixtures for the whole suite: configurations composed as a run gets them, and the command line in this process."""

import functools
import gc
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import omegaconf
import pytest
from forks import Forks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, grammar_parser

from solrl_lightning.__main__ import main
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.options.run import Run

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # processes for the few kernels compiled here would import torch


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Puts the tests on a cluster of Ray together, and those that fork: one process of the suite starts it for all."""
    items.sort(key=lambda item: ("cluster" not in item.fixturenames, "forks" not in item.fixturenames))


def pytest_collection_finish() -> None:
    """In the processes that run tests; the one that starts them needs no torch."""
    import torch

    torch.set_num_threads(1)  # at these sizes threads wait for each other more than they compute
    # pytest adds a handler to loggers that do not propagate; with one, torch.compile formats thousands of records.
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()  # a tenth of the time was garbage collection among what the libraries keep


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else nanobind reports leaks


@pytest.fixture(scope="session", autouse=True)
def files_of_the_package_are_read_once() -> Iterator[None]:
    """What Hydra reads and parses is kept, and its composition is its own: a command line has up to four, of 0.1 s."""
    read, files = ConfigRepository.load_config, dict[Any, bytes]()

    def read_once(self: ConfigRepository, config_path: str) -> Any:
        key = *(source.path for source in self.get_sources()), config_path
        if any(source.scheme() == "file" for source in self.get_sources()):  # a test's own
            return read(self, config_path)
        if key not in files:
            files[key] = pickle.dumps(read(self, config_path))
        return pickle.loads(files[key])

    list_options, groups = ConfigLoaderImpl.get_group_options, dict[Any, list[str]]()

    def listed_once(self: ConfigLoaderImpl, group_name: str, *args: Any, **kw: Any) -> list[str]:
        sources = (*(source.path for source in self.get_search_path().get_path()),)
        if any(not path.startswith(("pkg://", "structured://")) for path in sources):
            return list_options(self, group_name, *args, **kw)
        key = sources, group_name, *args, *kw.values()
        if key not in groups:
            groups[key] = list_options(self, group_name, *args, **kw)
        return list(groups[key])

    with pytest.MonkeyPatch.context() as patch:
        for user_of_the_grammar in (omegaconf.base, omegaconf._utils):
            patch.setattr(user_of_the_grammar, "parse", functools.cache(grammar_parser.parse))
        patch.setattr(ConfigLoaderImpl, "get_group_options", listed_once)
        patch.setattr(ConfigRepository, "load_config", read_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def runs_are_recorded_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


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
        return tree.compose(arguments)


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
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    for logger in others:
        logger.handlers.clear()
        logger.propagate = True
    torch.set_default_dtype(dtype)  # transformers leaves that of a model which it failed to make
    HydraConfig.instance().cfg = None
