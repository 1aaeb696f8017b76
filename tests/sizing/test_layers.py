"""Rows about layers of the shadow: errors, speed and backends."""

import math

import pytest
import torch
from torch import Tensor, nn

from solrl_lightning.artifacts.tables import OK, SLOW, WRONG, Row
from solrl_lightning.quantization import Backend, resolve
from solrl_lightning.quantization.scaled_linear import EmulatedINT8Linear
from solrl_lightning.sizing import layers
from solrl_lightning.sizing.layers import compare_backends, judge_backend, judge_backends, judge_error, judge_speed
from solrl_lightning.sizing.plan import Plan

CPU = torch.device("cpu")
SPEED = Row("layer", OK, "2 ms", "", {"seconds": 0.002})


def backend_of(precision: str, name: str = "emulated") -> Backend:
    return resolve(precision, "emulated", CPU)._replace(name=name)


@pytest.mark.parametrize("precision", ["nvfp4", "fp8", "int8"])
def test_layer_is_compared_with_the_exact_product(precision: str) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 48, dtype=torch.bfloat16), torch.randn(600, 64, dtype=torch.bfloat16)
    linear.bias.data.mul_(3)
    backend = backend_of(precision)
    assert backend.linear_cls is not None
    with torch.no_grad():
        y = backend.linear_cls(linear)(x)
        right, wrong = (layers.largest_error(product, x, linear, precision) for product in (y, 1.1 * y))
        without_bias = layers.largest_error(y - linear.bias, x, linear, precision)
        unquantised = layers.largest_error(linear(x), x, linear, precision)
    assert judge_error(SPEED, right, precision).status == OK
    assert right < 2**-7 < min(wrong, without_bias)
    assert unquantised > 1.3 * right  # so it is the quantised product that is expected
    for error in (wrong, without_bias, math.nan):
        row = judge_error(SPEED, error, precision)
        assert row.status == WRONG and "precision.backend=emulated" in row.way_out
        assert row.measured is not None and row.measured["seconds"] == 0.002


def test_layer_is_slow_only_if_hardware_units_are_slower_than_bf16() -> None:
    native, emulated = backend_of("int8", "torch"), backend_of("int8")
    slow = judge_speed("blocks", native, 3.0, 2.0, False)
    assert slow.status == SLOW and "3 s, 1.50 x BF16's 2 s, eager" in slow.result
    assert "family.compile=true" in slow.way_out
    assert "family.compile" not in judge_speed("blocks", native, 3.0, 2.0, True).way_out
    for backend, seconds in ((native, 1.0), (emulated, 3.0), (resolve("bf16", "auto", CPU), 3.0)):
        assert judge_speed("blocks", backend, seconds, 2.0, False).status == OK


def test_backends_that_compute_here_are_timed_on_the_largest_layer(embedded_plan: Plan) -> None:
    backend = resolve("nvfp4", "emulated", CPU)
    (row,) = compare_backends(embedded_plan, backend, 2, CPU, compiled=False)
    assert row.check == "backends 128->512" and row.status == OK and row.measured is not None
    native = {"int8 (torch)"} if resolve("int8", "auto", CPU).name == "torch" else set()
    assert set(row.measured["seconds"]) == {"bf16", *native}  # nothing emulated


def test_a_backend_is_slow_if_another_one_that_computes_here_is_faster() -> None:
    seconds = {"bf16": 4.0, "fp8 (torch)": 2.0, "nvfp4 (torch)": 1.9}
    assert judge_backends("backends", "fp8 (torch)", seconds, {}).status == OK  # within 10 %
    slow = judge_backends("backends", "fp8 (torch)", seconds | {"nvfp4 (torch)": 1.0}, {})
    assert (slow.status, slow.way_out) == (SLOW, "precision=nvfp4 precision.backend=torch")
    slower_than_bf16 = judge_backends("backends", "fp8 (torch)", {"bf16": 1.0, "fp8 (torch)": 2.0}, {})
    assert slower_than_bf16.way_out.startswith("family=prefix")
    assert judge_backends("backends", "nvfp4 (emulated)", seconds, {}).status == OK  # `precision` says so


def test_backend_that_fails_is_named_and_the_others_are_timed(
    embedded_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Faulty(EmulatedINT8Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no\n kernel image")

    backends = {"fp8 (torch)": backend_of("fp8"), "int8 (torch)": backend_of("int8")._replace(linear_cls=Faulty)}
    monkeypatch.setattr(layers, "native_backends", lambda device: backends)
    for chosen, status in ((backend_of("nvfp4"), OK), (backend_of("int8", "torch"), WRONG)):
        (row,) = compare_backends(embedded_plan, chosen, 2, CPU, compiled=False)
        assert row.status == status and "int8 (torch) fails (RuntimeError: no kernel image)" in row.result
        assert row.measured is not None and set(row.measured["seconds"]) == {"bf16", "fp8 (torch)"}


def test_emulation_is_slow_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_fp8(precision: str, backend: str, device: torch.device) -> Backend:
        return backend_of(precision, "torch" if precision == "fp8" else "emulated")

    monkeypatch.setattr(layers, "resolve", with_fp8)
    on_gpu = judge_backend(backend_of("nvfp4"), torch.device("cuda", 0), used=True)
    assert on_gpu.status == SLOW and on_gpu.way_out.startswith("precision=fp8 or family=prefix")
    assert "fp8 (torch), int8 (emulated)" in on_gpu.result
    assert judge_backend(backend_of("nvfp4"), CPU, used=True).status == OK
    assert judge_backend(backend_of("nvfp4"), torch.device("cuda", 0), used=False).status == OK
