"""Short measurements, and the plan of the embedded model."""

from collections.abc import Callable

import pytest
import torch

from solrl_lightning.options.run import Run
from solrl_lightning.quantization import resolve
from solrl_lightning.sizing import blocks, timing
from solrl_lightning.sizing.plan import Plan, plan_run, without_files

_plans: list[Plan] = []


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SECONDS", 0.0)
    monkeypatch.setattr(blocks, "_CPU_PRODUCTS", 1)
    monkeypatch.setattr(blocks, "_BLOCKS", 1)


@pytest.fixture
def embedded_plan(compose: Callable[..., Run]) -> Plan:
    """The plan of the embedded model with an emulated NVFP4 shadow, made once."""
    if not _plans:
        backend = resolve("nvfp4", "emulated", torch.device("cpu"))
        _plans.append(plan_run(without_files(compose()), backend, recomputed=(False,)))
    return _plans[0]
