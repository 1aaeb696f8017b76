"""What ``family.compile`` and ``compile_training`` mean on which hardware."""

import shutil

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


@pytest.mark.parametrize("compiler", ["g++", "clang++", "c++", None])
def test_auto_compiles_on_a_gpu_only_and_says_so(compiler: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/x" if name == compiler else None)
    on_gpu, line = should_compile(*ROLLOUTS, "auto", GPU)
    assert on_gpu and "compiled" in line
    on_cpu, line = should_compile(*ROLLOUTS, "auto", CPU)
    assert not on_cpu and "eagerly" in line and "family.compile=true" in line


@pytest.mark.parametrize("compiler", ["g++", "clang++", "c++"])
def test_true_compiles_on_a_cpu_that_has_a_compiler(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/x" if name == compiler else None)
    assert can_compile(CPU) and should_compile(*ROLLOUTS, True, CPU) == (
        True,
        "family.compile=true: rollouts are compiled",
    )


def test_true_is_refused_on_a_cpu_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert can_compile(GPU) and not can_compile(CPU)
    with pytest.raises(UserError, match="Install one, or set compile_training=false"):
        should_compile("compile_training", "training steps", True, CPU)
    assert should_compile(*ROLLOUTS, True, GPU)[0]


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
