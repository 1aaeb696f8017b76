"""Short measurements, and the plan of the embedded model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from solrl_lightning.options.run import Run
from solrl_lightning.quantization import resolve
from solrl_lightning.sizing import blocks, timing
from solrl_lightning.sizing.plan import Plan, plan_run, without_files
from solrl_lightning.sizing.trace import Passes, trace

_plans: list[Plan] = []
_traced: dict[str, Passes] = {}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SECONDS", 0.0)
    monkeypatch.setattr(blocks, "_CPU_PRODUCTS", 1)
    monkeypatch.setattr(blocks, "_BLOCKS", 1)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace a model, as it is trained, for the first plan of it."""

    def trace_once(model: Any, train: Callable[[Any], Any]) -> Any:
        key = repr((model.transformer.config, train))
        if key not in _traced:
            _traced[key], trained = trace(model, train)
            return _traced[key], trained
        with torch.device(model.device):
            return _traced[key], train(model.transformer)

    monkeypatch.setattr("solrl_lightning.sizing.plan.trace", trace_once)


@pytest.fixture
def embedded_plan(compose: Callable[..., Run]) -> Plan:
    """The plan of the embedded model with an emulated NVFP4 shadow, made once."""
    if not _plans:
        backend = resolve("nvfp4", "emulated", torch.device("cpu"))
        _plans.append(plan_run(without_files(compose()), backend))
    return _plans[0]
