"""Malformed command lines and files end in one line and status 2, with every file as it was."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import malformed
import pytest

import solrl_lightning
from solrl_lightning import __main__ as entry

Command = Callable[..., Any]

SMALL = (
    "experiment=smoke trainer=cpu iterations=1 prompts_per_iteration=1 family.pool=4 family.keep=2 model.full_steps=2 "
    "model.preview_steps=1 model.eval_steps=1 data.eval_prompts=1 data.eval_images=1 evaluation.every=5 "
    "family.compile=false"
).split()


def files_of(folder: Path) -> dict[str, bytes | None]:
    """The content of each file; folders and what is no file have none."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def faults(command: Command, folder: Path, cases: Iterable[malformed.Case]) -> list[str]:
    """What is wrong with how each of ``cases`` ends; nothing for one line, status 2 and the same files as before."""
    found, before = [], files_of(folder)
    for name, arguments in cases:
        try:
            done = command(*arguments)
            lines = done.err.splitlines()
            if done.status != 2 or len(lines) != 1 or not lines[0].startswith("error: "):
                found.append(f"{name}: status {done.status}, {done.err!r}")
        except Exception as error:
            found.append(f"{name}: {error!r}")
        after = files_of(folder)
        if after != before:
            found.append(f"{name}: {sorted(key for key in after | before if after.get(key) != before.get(key))[:3]}")
            before = after
    return found


class Accepted(Exception):
    """A command line that was to be refused reached its task."""


@pytest.fixture
def no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(target: str) -> Callable[..., Any]:
        get_method(target)
        return refuse

    def refuse(cfg: Any) -> None:
        raise Accepted

    get_method = entry.get_method
    monkeypatch.setattr(entry, "get_method", found)


@pytest.mark.usefixtures("no_task")
def test_command_lines(command: Command, tmp_path: Path) -> None:
    assert faults(command, tmp_path, ((str(case), case) for case in malformed.command_lines())) == []


@pytest.mark.usefixtures("no_task")
def test_prompt_files(command: Command, tmp_path: Path) -> None:
    assert faults(command, tmp_path, list(malformed.prompt_files(tmp_path))) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    assert entry.main([*SMALL, f"hydra.run.dir={folder}"]) == 0
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    return folder


def test_checkpoints(command: Command, tmp_path: Path, run: Path) -> None:
    good = (run / "checkpoints" / "last.ckpt").read_bytes()
    cases = malformed.checkpoints(tmp_path, good)
    assert faults(command, tmp_path, [(name, [*SMALL, *arguments]) for name, arguments in cases]) == []


def test_training_states(command: Command, tmp_path: Path, run: Path) -> None:
    assert faults(command, tmp_path, list(malformed.training_states(tmp_path, run))) == []


def test_records_of_runs(command: Command, tmp_path: Path, run: Path) -> None:
    assert faults(command, tmp_path, list(malformed.records(tmp_path, run))) == []


def test_model_folders(command: Command, tmp_path: Path) -> None:
    tiny = Path(solrl_lightning.__file__).parent / "assets" / "tiny"
    assert faults(command, tmp_path, list(malformed.model_folders(tmp_path, tiny))) == []


def test_reward_files(command: Command, tmp_path: Path) -> None:
    assert faults(command, tmp_path, list(malformed.reward_files(tmp_path))) == []


def test_key_that_the_writer_of_a_logger_does_not_take(command: Command, tmp_path: Path) -> None:
    assert faults(command, tmp_path, [("logger", [*SMALL, "+logger.tensorboard.foo=1"])]) == []


def test_callback_that_needs_a_logger(command: Command) -> None:
    monitor = "+callbacks.rate._target_=lightning.pytorch.callbacks.LearningRateMonitor"
    done = command(*SMALL, "~logger", monitor)
    assert done.status == 2
    (line,) = (line for line in done.err.splitlines() if line.startswith("error: "))
    assert "Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger" in line
    assert "Traceback" not in done.err
