"""Rows about the machine and files: drivers, packages, caches and the hub."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from omegaconf import OmegaConf
from torch.utils.collect_env import SystemEnv

from solrl_lightning.artifacts.tables import OK, WRONG
from solrl_lightning.sizing.environment import judge_cuda, judge_transformer_engine, locate, without_kernel


def test_gpu_that_torch_does_not_find_is_wrong() -> None:
    nothing = SystemEnv(**dict.fromkeys(SystemEnv._fields))
    gpu = nothing._replace(nvidia_gpu_models="GPU 0: NVIDIA H200", nvidia_driver_version="580.1")
    rows = [
        judge_cuda(nothing._replace(cuda_compiled_version="13.0", is_cuda_available="False")),
        judge_cuda(gpu._replace(cuda_compiled_version="13.0", is_cuda_available="True")),
        judge_cuda(gpu._replace(cuda_compiled_version="13.0", is_cuda_available="False")),
        judge_cuda(gpu._replace(is_cuda_available="False")),
    ]
    assert [row.status for row in rows] == [OK, OK, WRONG, WRONG]
    assert "driver 580.1 sees GPU 0: NVIDIA H200; but torch finds none" in rows[2].result
    assert "a driver" in rows[2].way_out and "built for CUDA" in rows[3].way_out


def test_listing_has_what_tells_how_fast_the_cpu_computes() -> None:
    listing = "CPU(s):    2\nModel name:  A\nL1d cache: 96 KiB\nFlags: fpu avx512_bf16 amx_tile\nVulnerability: none"
    nothing = SystemEnv(**dict.fromkeys(SystemEnv._fields))
    facts = without_kernel(nothing._replace(python_platform="Linux-6.18", cpu_info=listing))
    assert facts["cpu_info"] == "CPU(s): 2\nModel name: A\nL1d cache: 96 KiB\nFlags: avx512_bf16 amx_tile"
    assert "python_platform" not in facts and without_kernel(nothing)["cpu_info"] == ""


def test_one_of_transformer_engines_two_packages_is_wrong() -> None:
    names = ("transformer_engine", "transformer_engine_torch")
    for versions, status in (((None, None), OK), (("2.9", "2.9"), OK), (("2.9", None), WRONG)):
        assert judge_transformer_engine(dict(zip(names, versions, strict=True))).status == status


def test_files_are_searched_on_this_machine_then_in_the_cache_then_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []

    def no_network(self: Any, source: str, timeout: float) -> None:
        timeouts.append(timeout)
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    row = locate("reward.pretrained", "owner/name")
    assert row.status == WRONG and "no route to the hub" in row.result
    assert row.way_out.startswith("reward.pretrained=<folder>") and timeouts == [5.0]
    assert locate("reward.pretrained", str(tmp_path)).status == OK

    def cached(source: str, local_files_only: bool) -> str:
        assert local_files_only
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert locate("reward.pretrained", "owner/name").result.endswith(str(tmp_path / "snapshot"))
    assert len(timeouts) == 1


def test_access_to_a_gated_model_is_checked_with_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gated(OSError):
        pass

    def refuse(self: Any, source: str) -> None:
        raise Gated("access is restricted")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    info = OmegaConf.create({"gated": False})
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, source, timeout: info)
    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", refuse)
    assert "a run downloads it" in locate("model.pretrained", "owner/name").result
    info.gated = "manual"
    row = locate("model.pretrained", "owner/name")
    assert row.status == WRONG and "access is restricted" in row.result and "hf auth login" in row.way_out
