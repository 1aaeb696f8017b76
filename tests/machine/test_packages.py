from pathlib import Path

import pytest

from solrl_lightning.machine.packages import is_installed


def test_a_folder_of_the_name_of_a_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("torch") and not is_installed("no_such_tracker") and not is_installed("nowhere_at_all")
