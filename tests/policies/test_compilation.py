"""What ``family.compile`` means on which hardware."""

import shutil

import pytest
import torch

from solrl_lightning.errors import UserError
from solrl_lightning.policies.compilation import can_compile, should_compile

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("compiler", ["g++", "clang++", "c++", None])
def test_auto_compiles_on_a_gpu_only_and_says_so(compiler: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/x" if name == compiler else None)
    on_gpu, line = should_compile("auto", GPU)
    assert on_gpu and "compiled" in line
    on_cpu, line = should_compile("auto", CPU)
    assert not on_cpu and "eagerly" in line and "family.compile=true" in line


@pytest.mark.parametrize("compiler", ["g++", "clang++", "c++"])
def test_true_compiles_on_a_cpu_that_has_a_compiler(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/x" if name == compiler else None)
    assert can_compile(CPU) and should_compile(True, CPU) == (True, "family.compile=true")


def test_true_is_refused_on_a_cpu_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert can_compile(GPU) and not can_compile(CPU)
    with pytest.raises(UserError, match="Install one, or set family.compile=false"):
        should_compile(True, CPU)
    assert should_compile(True, GPU)[0]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_false_never_compiles(device: torch.device) -> None:
    assert should_compile(False, device) == (False, "family.compile=false")
