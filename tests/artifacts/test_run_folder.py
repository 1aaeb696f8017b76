"""The folder that a command locks is the one that its run writes."""

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solrl_lightning.artifacts.files import write_atomically, written_whole
from solrl_lightning.artifacts.run_folder import LOG, RECORD, check_writable, claimed
from solrl_lightning.errors import FolderLost, UserError
from solrl_lightning.options.run import Run

Command = Callable[..., Any]
TASK = f"task._target_={__name__}.list_locks"


def list_locks(cfg: Run) -> None:
    """A task that prints the run's folder and all locked folders."""
    print(cfg.run_dir, *sorted(str(lock.parent) for lock in Path("outputs").absolute().rglob(".lock")))


def write(cfg: Run) -> None:
    logging.getLogger(__name__).warning("after")


def test_lock_is_in_the_folder_of_the_run(command: Command) -> None:
    (first, *locks), (second, *others) = (command(TASK).out.splitlines()[-1].split() for _ in range(2))
    assert (locks, others) == ([first], [second])
    assert first != second  # a new time for each command


def test_the_error_of_a_run_whose_mount_is_gone_is_its_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close

    def disconnected(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="^reported$"), claimed(tmp_path / "run", True):
        patch.setattr(os, "close", disconnected)
        raise ValueError("reported")
    with claimed(tmp_path / "run", True):  # it is free
        assert (tmp_path / "run" / ".lock").is_file()


def test_lock_of_a_sweep_is_in_the_folder_of_its_runs(command: Command) -> None:
    lines = [line.split() for line in command("-m", TASK, "seed=1,2").out.splitlines() if line.startswith("/")]
    assert [locks for _, *locks in lines] == [[str(Path(run).parent), run] for run, *_ in lines] and len(lines) == 2


@pytest.mark.parametrize("leave", [lambda run: run.rename(run.with_name("moved")), shutil.rmtree])
def test_a_run_whose_folder_has_gone_does_not_write_into_the_folder_of_another_run(
    tmp_path: Path, leave: Callable[[Path], object]
) -> None:
    run = tmp_path / "run"
    with claimed(run, new=True):
        (run / RECORD).mkdir()
        write_atomically(run / "summary.json", b"first")
        leave(run)
        write_atomically(run / "summary.json", b"in a folder that is made again")
        (run / RECORD).mkdir()  # by another process
        (run / ".lock").touch()
        for writes in (lambda: write_atomically(run / "summary.json", b"first"), written_whole(run / "lora").__enter__):
            with pytest.raises(
                FolderLost, match=f"^The folder {run} of this run was moved or removed, and another run"
            ):
                writes()
        write_atomically(tmp_path / "elsewhere", b"first")
    assert {file.name for file in run.iterdir()} == {RECORD.name, ".lock", "summary.json"}
    assert (run / "summary.json").read_bytes() == b"in a folder that is made again"


def test_a_mount_that_renames_no_folder_with_files_gets_them_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.replace

    def of_files(source: Path, target: Path) -> None:
        if source.is_dir():
            raise OSError(errno.EMFILE, "Too many open files")
        rename(source, target)

    monkeypatch.setattr(os, "replace", of_files)
    with written_whole(tmp_path / "transformer") as part:
        (part / "below").mkdir()
        (part / "below" / "config.json").write_text("{}")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files == [tmp_path / "transformer" / "below" / "config.json"] and files[0].read_text() == "{}"


@pytest.mark.parametrize("logging_of", ["default", "stdout", "disabled", "none"])
def test_the_log_is_in_the_folder_with_each_of_hydra_s_settings(
    command: Command, tmp_path: Path, logging_of: str
) -> None:
    ended = command(f"task._target_={__name__}.write", "hydra.run.dir=run", f"hydra/job_logging={logging_of}")
    assert ended.status == 0, ended.err
    assert (tmp_path / "run" / LOG).is_file() == (logging_of != "none")


def test_a_run_appends_to_a_log_of_its_own(command: Command, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    for name, link in (("hard", os.link), ("soft", os.symlink)):
        stored = tmp_path / "cache" / name
        stored.write_text("before\n")
        (tmp_path / name).mkdir()
        link(stored, tmp_path / name / LOG)
        command(f"task._target_={__name__}.write", f"hydra.run.dir={name}")
        assert stored.read_text() == "before\n"
        assert (tmp_path / name / LOG).read_text().startswith("before\n[2")


def test_a_link_to_nothing_or_to_itself_is_an_error(command: Command, tmp_path: Path) -> None:
    for target in ("nowhere", "link"):
        (tmp_path / "link").symlink_to(target)
        result = command(TASK, "hydra.run.dir=link/run")
        assert result.status == 2 and "cannot be written: " in result.err
        (tmp_path / "link").unlink()


@pytest.mark.parametrize("name", ["checkpoints", "samples", "lora"])
def test_a_folder_of_a_run_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As the first user of a group has left it; root may write everywhere."""
    mkdir = os.mkdir

    def mkdir_elsewhere(path: Any, mode: int = 0o777) -> None:
        if Path(path).parent.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, mode)

    check_writable(tmp_path)
    (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "mkdir", mkdir_elsewhere)
    with pytest.raises(UserError, match=rf"cannot be written: Permission denied at {tmp_path / name}\. Make it writ"):
        check_writable(tmp_path)


def test_an_argument_that_is_not_in_utf_8_is_an_error(command: Command) -> None:
    assert r"Cannot read 'ckpt=l\udce4ufe/a.ckpt': it must be in UTF-8" in command("ckpt=l\udce4ufe/a.ckpt").err


def test_a_name_that_is_not_in_utf_8_is_an_error(tmp_path: Path) -> None:
    check_writable(tmp_path / "ümlaut")
    with pytest.raises(UserError, match=r"The run's folder .*\\udcfcmlaut is invalid: its name must be in UTF-8"):
        check_writable(tmp_path / "\udcfcmlaut")
