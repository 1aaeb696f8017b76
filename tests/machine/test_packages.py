import sys
from pathlib import Path

import pytest

from solrl_lightning.errors import UserError
from solrl_lightning.machine.packages import check_not_hidden, is_installed


def test_a_folder_of_the_name_of_a_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("torch") and not is_installed("no_such_tracker") and not is_installed("nowhere_at_all")


def test_a_file_of_the_name_of_a_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    (tmp_path / "peft").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    check_not_hidden()
    (tmp_path / "peft.py").touch()
    with pytest.raises(UserError, match=r"peft\.py is invalid: .* in place of the package peft\. Rename it\."):
        check_not_hidden()
    (tmp_path / "peft.py").unlink()
    (tmp_path / "peft" / "__init__.py").touch()
    check_not_hidden()  # in a folder of PYTHONPATH, as of its developer
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path}/peft is invalid: .* in place of the package peft. Rename it."):
        check_not_hidden()
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    with pytest.raises(UserError, match="The working directory was removed. Go to another one with cd <folder>."):
        check_not_hidden()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # where pip install --target . has put all of them
    check_not_hidden()
