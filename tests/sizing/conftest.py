"""Short measurements."""

import pytest

from solrl_lightning.sizing import blocks, timing


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SECONDS", 0.0)
    monkeypatch.setattr(blocks, "_CPU_PRODUCTS", 1)
    monkeypatch.setattr(blocks, "_BLOCKS", 1)
