"""The folder that a command locks is the one that its run writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solrl_lightning.artifacts.run_folder import check_writable
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run

Command = Callable[..., Any]
TASK = f"task._target_={__name__}.list_locks"


def list_locks(cfg: Run) -> None:
    """A task that prints the run's folder and all locked folders."""
    print(cfg.run_dir, *sorted(str(lock.parent) for lock in Path("outputs").absolute().rglob(".lock")))


def test_lock_is_in_the_folder_of_the_run(command: Command) -> None:
    (first, *locks), (second, *others) = (command(TASK).out.split() for _ in range(2))
    assert (locks, others) == ([first], [second])
    assert first != second  # a new time for each command


def test_lock_of_a_sweep_is_in_the_folder_of_its_runs(command: Command) -> None:
    lines = [line.split() for line in command("-m", TASK, "seed=1,2").out.splitlines() if line.startswith("/")]
    assert [locks for _, *locks in lines] == [[str(Path(run).parent), run] for run, *_ in lines] and len(lines) == 2


def test_a_link_to_nothing_or_to_itself_is_an_error(command: Command, tmp_path: Path) -> None:
    for target in ("nowhere", "link"):
        (tmp_path / "link").symlink_to(target)
        result = command(TASK, "hydra.run.dir=link/run")
        assert result.status == 2 and "link is a link to nothing, or to itself" in result.err
        (tmp_path / "link").unlink()


def test_a_name_that_is_not_in_utf_8_is_an_error(tmp_path: Path) -> None:
    check_writable(tmp_path / "ümlaut")
    with pytest.raises(UserError, match=r"The run's folder .*\\udcfcmlaut is invalid: its name must be in UTF-8"):
        check_writable(tmp_path / "\udcfcmlaut")
