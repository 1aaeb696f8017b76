"""Errors of libraries that read files, and those that are not about files."""

import errno

import pytest

from solrl_lightning.artifacts.complete import reading
from solrl_lightning.errors import RewardError, UserError


def test_errors_of_the_machine_and_of_rewards_pass() -> None:
    for error in (OSError(errno.ENOSPC, "full"), RewardError("mine"), MemoryError()):
        with pytest.raises(type(error)), reading("the folder is invalid"):
            raise error
    with pytest.raises(UserError, match="the folder is invalid: a package is missing: No module. Install it"):
        with reading("the folder is invalid"):
            raise ImportError("No module.\nInstall it")
    with pytest.raises(UserError, match="a file is missing or damaged"), reading("the folder is invalid"):
        raise KeyError("transformer")
