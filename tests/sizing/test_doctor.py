"""The command: complete reports without tracebacks or secrets."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from solrl_lightning.artifacts.tables import OK, SKIPPED, WRONG, Row, format_row
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.quantization.backends import Hardware
from solrl_lightning.quantization.first_run import first_run
from solrl_lightning.quantization.formats import FORMATS
from solrl_lightning.tasks import doctor
from solrl_lightning.tasks.doctor import check_run, guarded

Compose, Patch = Callable[..., Run], pytest.MonkeyPatch


def test_embedded_model_is_ok_and_the_report_does_not_contain_the_token(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very-secret-value")
    few_layers = "model.quantization.include=['*.net.0.proj','*.proj_mlp']"
    finished = command("task=doctor", "trainer=cpu", "task.iterations=0", "hydra.run.dir=out", few_layers)
    assert finished.status == 0, finished.err
    report = json.loads((tmp_path / "out" / "doctor.json").read_text())
    rows = {row["check"]: row for row in report["rows"]}
    assert report["counts"] == {"ok": len(rows), "slow": 0, "wrong": 0, "skipped": 0}
    assert all(set(row) == {"check", "status", "result", "way_out", "measured", "expected"} for row in rows.values())
    assert {"machine", "packages", "cuda", "precision", "layer 128->512", "blocks", "memory", "reward"} <= set(rows)
    assert rows["machine"]["measured"]["torch_version"] == torch.__version__
    assert rows["packages"]["measured"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert rows["first run"]["measured"] == first_run(Hardware("", "cpu"))._asdict()
    assert "family=sol_rl precision=nvfp4: " in rows["first run"]["result"]
    assert rows["precision"]["measured"]["others"].keys() == FORMATS.keys() - {"nvfp4"}
    assert 0 < rows["layer 128->512"]["measured"]["error"] <= rows["layer 128->512"]["measured"]["tolerance"]
    assert f"{rows['layer 128->512']['measured']['tolerance']:.1e}: " in rows["layer 128->512"]["expected"]
    assert rows["compilation"]["measured"] == {"graphs": 4, "recompilations": 0, "backend": "eager"}
    assert rows["memory"]["measured"]["planned"] < rows["memory"]["measured"]["total"]
    assert report["peak_memory"] > 50 * 2**20
    assert 0 < report["seconds"] < report["seconds_since_process_start"]
    lines = finished.out.splitlines()
    assert max(map(len, lines[:-1])) <= 100  # the last one is a path
    for row in rows.values():
        assert any(line.startswith(f"{row['check']:<20}{row['status']}") for line in lines)
    written = b"".join(file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert "very-secret" not in finished.out + finished.err and b"very-secret" not in written


def test_wrong_row_gives_status_1_and_a_complete_report(command: Callable[..., Any], tmp_path: Path) -> None:
    finished = command("task=doctor", "precision=nvfp4", "precision.backend=torch", "trainer=cpu", "hydra.run.dir=out")
    assert finished.status == 1
    assert finished.err == "error: wrong here: set-up; the lines above say what to do.\n"
    report = json.loads((tmp_path / "out" / "doctor.json").read_text())
    assert report["counts"]["wrong"] == 1
    (row,) = (row for row in report["rows"] if row["status"] == "wrong")
    assert row["check"] == "set-up" and "use precision.backend=emulated" in row["result"]


def test_skipped_row_has_its_reason(compose: Compose, monkeypatch: Patch) -> None:
    for other in ("check_layers", "check_blocks"):
        monkeypatch.setattr(doctor, other, lambda *args: iter(()))
    cfg = compose("task=doctor", "trainer=cpu", "reward=clipscore", "reward.pretrained=nobody/nowhere")
    skipped = {row.check: row.result for row in check_run(cfg) if row.status == SKIPPED}
    assert skipped.keys() == {"reward", "iterations"}
    assert all("reward.pretrained" in actual for actual in skipped.values())


@pytest.mark.parametrize(("compiles", "expected"), [("auto", False), ("true", True)])
def test_layers_and_blocks_of_a_cpu_are_compiled_as_in_a_run(
    compose: Compose, monkeypatch: Patch, compiles: str, expected: bool
) -> None:
    compiled: list[Any] = []
    for check in ("check_layers", "check_blocks"):
        monkeypatch.setattr(doctor, check, lambda *args: iter(compiled.append(args[-1]) or ()))
    options = f"task=doctor trainer=cpu precision=int8 model.weights=random task.iterations=0 family.compile={compiles}"
    list(check_run(compose(*options.split())))
    assert compiled == [expected] * 2


def test_memory_of_random_weights_is_without_text_encoders(compose: Compose, monkeypatch: Patch) -> None:
    for other in ("check_layers", "check_blocks"):
        monkeypatch.setattr(doctor, other, lambda *args: iter(()))
    options = "task=doctor trainer=cpu model.weights=random model.gradient_checkpointing=auto task.iterations=0"
    (row,) = (row for row in check_run(compose(*options.split())) if row.check == "memory")
    assert row.measured is not None and row.measured["parts"]["text_encoders"] == 0
    assert "; with text encoders, model.gradient_checkpointing=auto is " in row.result


def test_error_in_a_check_becomes_a_wrong_row() -> None:
    def failing(error: Exception) -> Iterator[Row]:
        yield Row("layer", OK, "fine")
        raise error

    before, bug = guarded("layers", failing(RuntimeError("CUBLAS\n failed")), "precision=bf16")
    assert before.status == OK
    assert bug == Row("layers", WRONG, "RuntimeError: CUBLAS failed", "precision=bf16")
    assert list(guarded("layers", failing(UserError("not so")), "x"))[1] == Row("layers", WRONG, "not so")


def test_row_has_at_most_100_columns_and_its_way_out_on_a_new_line() -> None:
    lines = format_row(Row("memory", WRONG, "too little " * 20, "model.micro_batch=3")).splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 100
    assert lines[0].startswith("memory              wrong    too little")
    assert lines[-1] == " " * 29 + "-> model.micro_batch=3"
