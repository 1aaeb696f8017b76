"""The doctor: rows that are slow or wrong, and complete reports without tracebacks or secrets."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from solrl_lightning.artifacts.tables import OK, SKIPPED, SLOW, WRONG, Row, format_row
from solrl_lightning.data.prompts import read_prompt_sets
from solrl_lightning.errors import UserError
from solrl_lightning.options.model import Model
from solrl_lightning.options.run import Run
from solrl_lightning.policies import replica
from solrl_lightning.policies.architectures import read_architecture
from solrl_lightning.policies.config_files import ARCHITECTURES, INDEX
from solrl_lightning.quantization import Backend, resolve
from solrl_lightning.rewards.geneval_metadata import broken_rule
from solrl_lightning.sizing import doctor_shadow
from solrl_lightning.sizing.doctor_machine import judge_cuda, judge_transformer_engine, locate
from solrl_lightning.sizing.doctor_shadow import (
    blocks,
    compare_backends,
    judge_backend,
    judge_backends,
    judge_error,
    judge_speed,
    largest_error,
    without_files,
    write_short,
)
from solrl_lightning.tasks import doctor
from solrl_lightning.tasks.doctor import (
    arithmetic,
    guarded,
    iterations,
    judge_memory,
    planned_bytes,
    rewards_of,
    scores,
    small,
    sources,
)
from solrl_lightning.tasks.plan import on_meta

Compose = Callable[..., Run]
CPU = torch.device("cpu")
SPEED = Row("layer", OK, "2 ms", "", {"seconds": 0.002})


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_shadow, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor_shadow, "_CPU_MACS", 1)
    monkeypatch.setattr(doctor_shadow, "_BLOCKS", 1)


def backend_of(precision: str, name: str = "emulated") -> Backend:
    return resolve(precision, "emulated", CPU)._replace(name=name)


# The command


def test_embedded_model_is_ok_and_the_report_does_not_contain_the_token(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very-secret-value")
    finished = command("task=doctor", "trainer=cpu", "task.iterations=0", "hydra.run.dir=out")
    assert finished.status == 0, finished.err
    report = json.loads((tmp_path / "out" / "doctor.json").read_text())
    rows = {row["check"]: row for row in report["rows"]}
    assert report["counts"] == {"ok": len(rows), "slow": 0, "wrong": 0, "skipped": 0}
    assert all(set(row) == {"check", "status", "found", "way_out", "measured"} for row in rows.values())
    assert {"packages", "cuda", "cpu", "disk", "precision", "layer 128->512", "blocks", "memory", "reward"} <= set(rows)
    assert rows["hub token"]["found"] == "present"
    assert rows["packages"]["measured"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert rows["precision"]["measured"]["others"].keys() == {"fp8", "int8"}
    assert 0 < rows["layer 128->512"]["measured"]["error"] <= rows["layer 128->512"]["measured"]["tolerance"]
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
    refused = ("precision=nvfp4", "precision.backend=torch", "trainer=cpu")
    finished = command("task=doctor", *refused, "hydra.run.dir=out")
    assert finished.status == 1
    assert finished.err == "error: wrong here: set-up; the lines above say what to do.\n"
    assert "Traceback" not in finished.out
    report = json.loads((tmp_path / "out" / "doctor.json").read_text())
    assert report["counts"]["wrong"] == 1
    (row,) = (row for row in report["rows"] if row["status"] == "wrong")
    assert row["check"] == "set-up" and "Use precision.backend=emulated" in row["found"]


def test_skipped_row_has_its_reason(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("layers", "blocks"):
        monkeypatch.setattr(doctor, other, lambda *args: iter(()))
    cfg = compose("task=doctor", "trainer=cpu", "reward=clipscore", "reward.pretrained=nobody/nowhere")
    skipped = {row.check: row.found for row in arithmetic(cfg) if row.status == SKIPPED}
    assert skipped.keys() == {"reward", "iterations"}
    assert all("reward.clipscore.pretrained" in found for found in skipped.values())


def test_iterations_are_counted(compose: Compose) -> None:
    compose("task=doctor")
    for value in ("-1", "0.5", "true"):
        with pytest.raises(UserError, match="task.iterations=.* must be a whole number of at least 0"):
            compose("task=doctor", f"task.iterations={value}")


# Numbers and speed


@pytest.mark.parametrize("precision", ["nvfp4", "fp8", "int8"])
def test_layer_is_compared_with_the_exact_product(precision: str) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 48, dtype=torch.bfloat16), torch.randn(600, 64, dtype=torch.bfloat16)
    backend = backend_of(precision)
    assert backend.linear_cls is not None
    with torch.no_grad():
        y = backend.linear_cls(linear)(x)
        right, wrong = (largest_error(product, x, linear, precision) for product in (y, 1.1 * y))
        without_bias = largest_error(y - linear.bias, x, linear, precision)
        unquantised = largest_error(linear(x), x, linear, precision)
    assert judge_error(SPEED, right, precision).status == OK
    assert right < 2**-7 < min(wrong, without_bias)
    assert unquantised > 1.3 * right  # so it is the quantised product that is expected
    for error in (wrong, without_bias, math.nan):
        row = judge_error(SPEED, error, precision)
        assert row.status == WRONG and "precision.backend=emulated" in row.way_out
        assert row.measured is not None and row.measured["seconds"] == 0.002


def test_layer_is_slow_only_if_hardware_units_are_slower_than_bf16() -> None:
    slower = {name: judge_speed("blocks", backend_of("int8", name), 3.0, 2.0, False) for name in ("torch", "emulated")}
    assert (slower["torch"].status, slower["emulated"].status) == (SLOW, OK)
    assert "family.compile=true" in slower["torch"].way_out and "3 s, 1.50 x BF16's 2 s, eager" in slower["torch"].found
    assert "family.compile" not in judge_speed("blocks", backend_of("int8", "torch"), 3.0, 2.0, True).way_out
    assert judge_speed("blocks", backend_of("int8", "torch"), 1.0, 2.0, True).status == OK
    assert judge_speed("blocks", resolve("bf16", "auto", CPU), 3.0, 2.0, True).status == OK


def test_backends_that_compute_here_are_timed_on_the_largest_layer(compose: Compose) -> None:
    backend = resolve("nvfp4", "emulated", CPU)
    model = on_meta(without_files(compose()), backend, recomputed=(False,))
    (row,) = compare_backends(model, backend, 2, CPU, compiled=False)
    assert row.check == "backends 128->512" and row.status == OK and row.measured is not None
    native = {"int8 (torch)"} if resolve("int8", "auto", CPU).name == "torch" else set()
    assert set(row.measured["seconds"]) == {"bf16", *native}  # nothing emulated


def test_a_backend_is_slow_if_another_one_that_computes_here_is_faster() -> None:
    seconds = {"bf16": 4.0, "fp8 (torch)": 2.0, "nvfp4 (torch)": 1.9}
    assert judge_backends("backends", "fp8 (torch)", seconds).status == OK  # within 10 %
    slow = judge_backends("backends", "fp8 (torch)", seconds | {"nvfp4 (torch)": 1.0})
    assert (slow.status, slow.way_out) == (SLOW, "precision=nvfp4 precision.backend=torch")
    assert judge_backends("backends", "fp8 (torch)", {"bf16": 1.0, "fp8 (torch)": 2.0}).way_out.startswith(
        "family=prefix"
    )
    assert judge_backends("backends", "nvfp4 (emulated)", seconds).status == OK  # `precision` says so


def test_emulation_is_slow_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_fp8(precision: str, backend: str, device: torch.device) -> Backend:
        return backend_of(precision, "torch" if precision == "fp8" else "emulated")

    monkeypatch.setattr(doctor_shadow, "resolve", with_fp8)
    on_gpu = judge_backend(backend_of("nvfp4"), torch.device("cuda", 0), used=True)
    assert on_gpu.status == SLOW and on_gpu.way_out.startswith("precision=fp8 or family=prefix")
    assert "fp8 (torch), int8 (emulated)" in on_gpu.found
    assert judge_backend(backend_of("nvfp4"), CPU, used=True).status == OK
    assert judge_backend(backend_of("nvfp4"), torch.device("cuda", 0), used=False).status == OK


# Compilation


def test_refresh_that_compiles_again_is_wrong(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed: set[tuple[nn.Module, str]] = set()

    def refresh(module: nn.Module, weights: Any) -> None:
        for name, _ in weights:
            if (module, name) in refreshed:
                module.get_submodule(name).bias = None
            refreshed.add((module, name))

    monkeypatch.setattr(replica, "refresh", refresh)
    cfg = compose("task=doctor")
    (row,) = blocks(cfg, on_meta(without_files(cfg), resolve("bf16", "auto", CPU)), None, CPU, compiled=False)
    assert row.status == WRONG and "family.compile=false" in row.way_out
    assert row.measured == {"graphs": 2, "recompilations": 2, "backend": "eager"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own access
def test_all_samplers_of_a_run_are_compiled_with_both_batch_sizes(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_shadow, "_CPU_MACS", 10**12)
    small = ["model.rollout_batch=2", "model.micro_batch=1", "compile_training=true", "model.quantization.exclude={}"]
    small += ["model.lora.target_modules=[to_q]", "model.quantization.include=['*.to_k']"]  # so that graphs are small
    cfg = compose("task=doctor", *small)
    shadow = backend_of("int8")
    row, _ = blocks(cfg, on_meta(without_files(cfg), shadow), shadow, CPU, compiled=False)
    assert row.status == OK and row.measured is not None
    assert "policy, reference, merged, shadow in batches of 2 and 1" in row.found
    # Both blocks make 5: policy with and without gradients, reference, merged, shadow.
    assert row.measured == {"graphs": 10, "recompilations": 0, "backend": "eager"}


@pytest.mark.parametrize(
    "folder", [index.parent for index in ARCHITECTURES.rglob(INDEX)], ids=lambda folder: folder.name
)
def test_blocks_are_a_few_of_the_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_shadow, "_BLOCKS", 2)
    architecture = read_architecture(folder)
    write_short(architecture, tmp_path)
    short, whole = (a.components["transformer"].config for a in (read_architecture(tmp_path), architecture))
    dual = whole.get("dual_attention_layers") or []
    changed = {"num_layers", "num_single_layers"} | ({"dual_attention_layers"} if dual else set())
    assert {key for key in whole if short[key] != whole[key]} == changed & whole.keys()
    assert short["num_layers"] == 2 + len(dual[:2])
    assert short.get("dual_attention_layers", [])[:2] == dual[:2]
    assert read_architecture(tmp_path).components["vae"].config == architecture.components["vae"].config


# Memory and iterations


def test_plan_that_does_not_fit_is_wrong_and_names_options_that_fit() -> None:
    parts = {"policy": 100, "shadow_here": 40, "training": 60, "text_encoders": 30}
    model = Model.model_construct(micro_batch=12, gradient_checkpointing=False)
    assert (planned_bytes(parts, on_gpu=False), planned_bytes(parts, on_gpu=True)) == (230, 200)
    assert judge_memory(parts, 200, model, on_gpu=True).status == OK
    assert judge_memory(parts, 229, model, on_gpu=False).status == WRONG
    close = judge_memory(parts, 185, model, on_gpu=True)  # 5 a row, and the encoders need 30
    assert close.status == WRONG
    ways = ["model.micro_batch=9", "model.gradient_checkpointing=true", "family=prefix, which needs no shadow"]
    assert close.way_out == ", or ".join(ways)
    assert close.measured is not None and (close.measured["planned"], close.measured["total"]) == (200, 185)
    model.gradient_checkpointing = True
    assert judge_memory(parts, 165, model, on_gpu=True).way_out == "family=prefix, which needs no shadow"
    assert "smaller model" in judge_memory(parts, 90, model, on_gpu=True).way_out


def test_iterations_fill_one_batch_of_the_rollout_and_one_of_the_training(compose: Compose) -> None:
    sizes = {}
    for model in ("tiny", "flux1"):
        own = small(compose("task=doctor", f"model={model}", "model.weights=random"), 2)
        sizes[model] = (own.prompts_per_iteration, own.family.pool, own.family.keep, own.task.repeats)
        assert own.data.train == "shapes-train"
    assert sizes == {
        "tiny": (1, 96, 24, 1),
        "flux1": (1, 24, 4, 1),
    }  # 24 x 2 and 4 x 4 noise levels


def test_iterations_use_a_prompt_that_the_reward_can_score(compose: Compose, tmp_path: Path) -> None:
    own = small(compose("task=doctor", "reward=[shapes,geneval]", f"run_dir={tmp_path}"), 2)
    prompts = read_prompt_sets(own.data.train, None)
    assert [broken_rule(prompts.metadata[prompt]) for prompt in prompts.train] == [""]
    (row,) = scores(compose("task=doctor", "reward=ocr"), CPU)
    assert row.status == OK and "ocr 0" in row.found  # of noise


def test_iterations_are_timed_by_stage(compose: Compose) -> None:
    cfg = compose("task=doctor", "experiment=smoke", "trainer=cpu", "model.full_steps=2", "model.preview_steps=1")
    model = on_meta(without_files(cfg), resolve("nvfp4", "emulated", CPU))
    (row,) = iterations(cfg, model, CPU, count=1)
    assert row.status == OK and row.measured is not None
    (lap,) = row.measured["laps"]
    assert {"requantize", "explore", "regenerate", "train"} <= lap["stages"].keys()
    assert sum(lap["stages"].values()) <= lap["seconds"]
    assert row.measured["peak_memory"]["bytes"] > 0 and row.measured["planned"] > 0


# Environment and files


def test_gpu_that_torch_does_not_find_is_wrong() -> None:
    seen = ["NVIDIA H200, 580.1, 143771 MiB, 0 MiB"]
    assert judge_cuda([], "13.0", False).status == judge_cuda(seen, "13.0", True).status == OK
    old_driver, cpu_build = judge_cuda(seen, "13.0", False), judge_cuda(seen, None, False)
    assert old_driver.status == cpu_build.status == WRONG
    assert "a driver" in old_driver.way_out and "built for CUDA" in cpu_build.way_out


def test_one_of_transformer_engines_two_packages_is_wrong() -> None:
    names = ("transformer_engine", "transformer_engine_torch")
    for versions, status in (((None, None), OK), (("2.9", "2.9"), OK), (("2.9", None), WRONG)):
        assert judge_transformer_engine(dict(zip(names, versions, strict=True))).status == status


def test_files_are_searched_on_this_machine_then_in_the_cache_then_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def no_network(self: Any, source: str, timeout: float) -> None:
        asked.append(timeout)
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    row = locate("reward.pretrained", "owner/name")
    assert row.status == WRONG and "no route to the hub" in row.found
    assert row.way_out.startswith("reward.pretrained=<folder>") and asked == [5.0]
    assert locate("reward.pretrained", str(tmp_path)).status == OK

    def cached(source: str, local_files_only: bool) -> str:
        assert local_files_only
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert locate("reward.pretrained", "owner/name").found.endswith(str(tmp_path / "snapshot"))
    assert len(asked) == 1


def test_access_to_a_gated_model_is_checked_with_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gated(OSError):
        pass

    def refuse(self: Any, source: str) -> None:
        raise Gated("access is restricted")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    info = OmegaConf.create({"gated": False})
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, source, timeout: info)
    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", refuse)
    assert "a run downloads it" in locate("model.pretrained", "owner/name").found
    info.gated = "manual"
    row = locate("model.pretrained", "owner/name")
    assert row.status == WRONG and "access is restricted" in row.found and "hf auth login" in row.way_out


def test_random_weights_and_the_embedded_model_need_no_files(compose: Compose) -> None:
    assert sources(compose("task=doctor")) == {}
    assert sources(compose("task=doctor", "model=flux1", "model.weights=random")) == {}
    flux = compose("task=doctor", "model=flux1", "reward=pickscore", "reward.pretrained=mine/own")
    assert sources(flux) == {"model.pretrained": "black-forest-labs/FLUX.1-dev"} | rewards_of(flux)
    assert rewards_of(flux)["reward.pickscore.pretrained"] == "mine/own"
    assert "reward.pickscore.processor" in rewards_of(flux)


# The report


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
