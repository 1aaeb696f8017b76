"""What ``family.compile`` and ``compile_training`` mean on which hardware."""

import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._inductor import config as inductor

from solrl_lightning.errors import UserError
from solrl_lightning.policies.compilation import can_compile, compile_blocks, should_compile

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ROLLOUTS = "family.compile", "rollouts"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of programs. Python's headers are installed."""
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(headers) if name == "include" else None)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "bin"


def install(folder: Path, name: str) -> None:
    (folder / name).touch(mode=0o755)


@pytest.mark.parametrize(
    ("program", "variables", "cpu", "gpu"),
    [
        ("g++", {}, True, False),
        ("gcc", {}, False, True),
        ("clang", {}, False, True),
        ("clang++", {}, False, False),  # Inductor does not look for it on Linux
        ("clang++", {"CXX": "clang++"}, True, False),
        ("ccache", {"CXX": "ccache g++"}, True, False),
        ("g++", {"CXX": "no-such-compiler"}, False, False),
        ("own-cc", {"CC": "own-cc"}, False, True),
        ("gcc", {"CC": "no-such-compiler"}, False, False),
        ("cat", {}, False, False),
    ],
)
def test_each_device_needs_the_compiler_that_it_calls(
    programs: Path, monkeypatch: pytest.MonkeyPatch, program: str, variables: dict[str, str], cpu: bool, gpu: bool
) -> None:
    install(programs, program)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (can_compile(CPU), can_compile(GPU)) == (cpu, gpu)


COMPILER, TRAINING = (
    "compiling needs a C compiler (gcc, clang or $CC) and Python.h",
    ("compile_training", "training steps"),
)


def test_gpu_compiles_with_a_compiler_and_headers(programs: Path) -> None:
    for missing in ("compiler", "headers"):
        compiles, line = should_compile(*ROLLOUTS, "auto", GPU)
        assert not compiles and "eagerly, because compiling needs a C compiler (gcc, clang or $CC) and Python.h" in line
        with pytest.raises(UserError, match="^compile_training=true is invalid: .* Run apt install gcc python3-dev"):
            should_compile(*TRAINING, True, GPU)
        install(programs, "gcc")
        if missing == "compiler":
            line = "family.compile=auto: rollouts are compiled, which takes minutes at first"
            assert should_compile(*ROLLOUTS, "auto", GPU) == (True, line)
            (programs.parent / "include" / "Python.h").unlink()


def test_cpu_compiles_only_when_required(programs: Path) -> None:
    compiles, line = should_compile(*ROLLOUTS, "auto", CPU)
    assert not compiles and "eagerly" in line and "family.compile=true" in line
    with pytest.raises(UserError, match="^compile_training=true is invalid: .*, or set compile_training=false"):
        should_compile(*TRAINING, True, CPU)
    install(programs, "g++")
    line = "family.compile=true: rollouts are compiled, which takes minutes at first"
    assert should_compile(*ROLLOUTS, True, CPU) == (True, line)
    for device in (CPU, GPU):
        assert should_compile(*ROLLOUTS, False, device) == (False, "family.compile=false: rollouts run eagerly")


def test_ddp_leaves_a_compiled_block_whole() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    class Block(nn.Sequential):  # torch 2.11 compiles no class of its own
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    block = Block(*(nn.Linear(512, 512) for _ in range(4)))  # 4 MB of gradients; DDP's first bucket has 1 MB
    transformer = nn.Module()
    transformer.blocks = nn.ModuleList([block])
    compile_blocks(transformer, backend=backend)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(block)(torch.ones(2, 512)).sum().backward()
    finally:
        distributed.destroy_process_group()
    assert len(graphs) == 1


def test_a_deterministic_run_chooses_no_compiled_kernel_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]))
    for enabled in (True, False):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda enabled=enabled: enabled)
        compile_blocks(transformer, backend="eager")
        assert inductor.deterministic is enabled
