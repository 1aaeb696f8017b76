"""Exploration by actors of Ray.

Ray ends the process of a driver without a word as soon as its node has ended, so the process of this suite is none.
"""

import os
import sys
from pathlib import Path

import pytest
from forks import Forks, ForksOfThisProcess
from ray_worker import forked_workers

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)  # of all tests in driver.py
def test_explorers(forks: Forks, tmp_path: Path) -> None:
    ended = forks.run(tmp_path, str(tmp_path), target="explorers/test_ray:run_driver")
    assert ended.status == 0, ended.output


class Runs:
    """A plugin of pytest: the fixture of a process that forks runs."""

    def __init__(self, forks: Forks) -> None:
        self.forks = forks

    @pytest.fixture
    def runs(self) -> Forks:
        return self.forks


def run_driver(arguments: list[str]) -> int:
    """Run the tests of driver.py, below a folder, after a fork for their runs: Ray's threads do not survive one."""
    (folder,) = arguments
    os.chdir(TESTS.parent)
    sys.path.insert(0, str(TESTS.parent))
    with ForksOfThisProcess() as forks, forked_workers():
        imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # before pytest could rewrite their assertions
        options = ["-x", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={folder}/driver", *imported]
        options += ["-W", "ignore::pytest.PytestUnraisableExceptionWarning"]  # what Ray leaves open
        return pytest.main([*options, str(TESTS / "explorers/driver.py")], plugins=[Runs(forks)])
