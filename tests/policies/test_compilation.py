"""What ``family.compile`` and ``compile_training`` mean on which hardware."""

import sysconfig
from pathlib import Path

import pytest
import torch
from diffusers.models.activations import GELU
from torch import nn
from torch.nn import functional as F

from solrl_lightning.errors import UserError
from solrl_lightning.policies.compilation import can_compile, should_compile
from solrl_lightning.policies.gelu import logistic_gelu, use_logistic_gelu

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


def test_auto_runs_eagerly_on_a_cpu_and_says_so(programs: Path) -> None:
    on_cpu, line = should_compile(*ROLLOUTS, "auto", CPU)
    assert not on_cpu and "eagerly" in line and "family.compile=true" in line


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
def test_compiler_of_each_device_is_the_one_that_it_calls(
    programs: Path, monkeypatch: pytest.MonkeyPatch, program: str, variables: dict[str, str], cpu: bool, gpu: bool
) -> None:
    install(programs, program)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (can_compile(CPU), can_compile(GPU)) == (cpu, gpu)


def test_auto_compiles_on_a_gpu_with_a_compiler_and_headers_and_says_why_not(programs: Path) -> None:
    for missing in ("compiler", "headers"):
        on_gpu, line = should_compile(*ROLLOUTS, "auto", GPU)
        assert (
            not on_gpu and "run eagerly, because compiling needs a C compiler (gcc, clang or $CC) and Python.h" in line
        )
        with pytest.raises(
            UserError, match="^compile_training=true is invalid: .* Run apt install gcc python3-dev, or"
        ):
            should_compile("compile_training", "training steps", True, GPU)
        install(programs, "gcc")
        if missing == "compiler":
            assert should_compile(*ROLLOUTS, "auto", GPU) == (
                True,
                "family.compile=auto: rollouts are compiled on this GPU",
            )
            (programs.parent / "include" / "Python.h").unlink()


def test_true_compiles_on_a_cpu_that_has_a_compiler(programs: Path) -> None:
    with pytest.raises(UserError, match="^compile_training=true is invalid: .*, or set compile_training=false"):
        should_compile("compile_training", "training steps", True, CPU)
    install(programs, "g++")
    assert should_compile(*ROLLOUTS, True, CPU) == (True, "family.compile=true: rollouts are compiled")


@pytest.mark.parametrize("device", [CPU, GPU])
def test_false_never_compiles(device: torch.device) -> None:
    assert should_compile(*ROLLOUTS, False, device) == (False, "family.compile=false: rollouts run eagerly")


def test_the_logistic_form_of_gelu_is_pytorch_s_tanh_form() -> None:
    x = torch.linspace(-30, 30, 6001)
    torch.testing.assert_close(logistic_gelu(x), F.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6)
    rounded = x.bfloat16()
    exact = F.gelu(rounded.double(), approximate="tanh")
    assert logistic_gelu(rounded).dtype == torch.bfloat16
    torch.testing.assert_close(logistic_gelu(rounded).double(), exact, rtol=2**-8, atol=1e-6)  # rounded once
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        x = torch.linspace(-9, 9, 6001).to(dtype).requires_grad_()
        reference = x.detach().double().requires_grad_()
        (found,), (slope,) = (
            torch.autograd.grad(y.sum(), [inputs])
            for y, inputs in ((logistic_gelu(x), x), (F.gelu(reference, approximate="tanh"), reference))
        )
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), slope, rtol=tolerance, atol=tolerance / 10)
    big = torch.tensor([3e38, -3e38])
    assert logistic_gelu(big).equal(torch.tensor([3e38, 0.0]))  # the cube overflows


def test_only_gelu_in_tanh_form_is_replaced_and_parameters_stay() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(GELU(4, 8, "tanh"), nn.GELU(approximate="tanh"), nn.GELU(), GELU(8, 8))
    transformer = nn.Module()
    transformer.blocks = nn.ModuleList([block])
    parameters, x = list(transformer.parameters()), torch.randn(3, 4)
    expected = block(x)
    use_logistic_gelu(transformer)
    changed = ["LogisticGELUProjection", "LogisticGELU", "GELU", "GELU"]
    assert [type(module).__name__ for module in block] == changed
    assert all(a is b for a, b in zip(transformer.parameters(), parameters, strict=True))
    torch.testing.assert_close(block.forward(x), expected, rtol=1e-5, atol=1e-6)
