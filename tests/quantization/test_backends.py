"""The choice of a backend by precision and hardware, its description, and the errors."""

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from torch import nn

from solrl_lightning.errors import UserError
from solrl_lightning.precisions import BACKENDS
from solrl_lightning.quantization import backends, resolve, transformer_engine

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
Hardware = Callable[..., torch.device]


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """Return a function: hardware("10.0") is an NVIDIA GPU of that compute capability, hardware("") the CPU."""

    def on(capability: str, te: bool = False, vnni: bool = False) -> torch.device:
        pair = tuple(map(int, capability.split("."))) if capability else (0, 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pair)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": vnni})
        monkeypatch.setattr(transformer_engine, "is_installed", lambda: te)
        return GPU if capability else CPU

    return on


@pytest.mark.parametrize(
    ("capability", "options", "nvfp4", "fp8", "int8"),
    [
        ("", {}, "emulated", "emulated", "emulated"),
        ("", {"vnni": True}, "emulated", "emulated", "torch"),
        ("7.5", {}, "emulated", "emulated", "emulated"),
        ("8.0", {}, "emulated", "emulated", "torch"),
        ("8.9", {"te": True}, "emulated", "torch", "torch"),
        ("9.0", {}, "emulated", "torch", "torch"),
        ("10.0", {}, "torch", "torch", "torch"),
        ("10.0", {"te": True}, "transformer_engine", "torch", "torch"),
        ("12.0", {"te": True}, "transformer_engine", "torch", "torch"),
    ],
)
def test_auto_selects_fastest_supported_backend(
    hardware: Hardware, capability: str, options: dict[str, bool], nvfp4: str, fp8: str, int8: str
) -> None:
    device = hardware(capability, **options)
    chosen = {precision: resolve(precision, "auto", device) for precision in ("nvfp4", "fp8", "int8")}
    assert {precision: backend.name for precision, backend in chosen.items()} == {
        "nvfp4": nvfp4,
        "fp8": fp8,
        "int8": int8,
    }
    assert all(
        "\n" not in backend.description and "precision.backend=auto: " in backend.description
        for backend in chosen.values()
    )


@pytest.mark.parametrize(
    ("capability", "backend", "products", "advice"),
    [
        ("", "auto", "FP32 products on this CPU", ""),
        ("7.5", "auto", "BF16 products on NVIDIA Test (compute capability 7.5)", ""),
        ("8.0", "auto", "BF16 products on NVIDIA Test (compute capability 8.0)", "int8"),
        ("9.0", "auto", "BF16 products on NVIDIA Test (compute capability 9.0)", "fp8"),
        ("10.0", "emulated", "BF16 products on NVIDIA Test (compute capability 10.0)", ""),
    ],
)
def test_emulation_description_names_operands_and_cost(
    hardware: Hardware, capability: str, backend: str, products: str, advice: str
) -> None:
    description = resolve("nvfp4", backend, hardware(capability, vnni=True)).description
    assert description == (
        f"precision.backend={backend}: NVFP4 is emulated by {products}: the shadow ranks candidates as NVFP4 does and "
        "costs no less time and memory than BF16"
    ) + (f" (precision={advice} is native on this GPU)" if advice else "")


def test_bits_per_weight_match_layer_buffers(hardware: Hardware) -> None:
    linear = nn.Linear(512, 256, bias=False)
    device = hardware("", vnni=True)
    for precision, name, bits in (
        ("nvfp4", "emulated", 32),
        ("fp8", "emulated", 32),
        ("int8", "emulated", 32),
        ("int8", "torch", 8),
    ):
        backend = resolve(precision, name, device)
        held = sum(buffer.nbytes for buffer in backend.linear_cls(linear).buffers())
        assert backend.bits_per_weight == bits
        assert 8 * held / linear.weight.numel() == pytest.approx(bits, rel=0.01)  # and the scales
    assert resolve("bf16", "auto", device).bits_per_weight == 16
    blackwell = hardware("10.0", te=True)
    packed = resolve("nvfp4", "torch", blackwell)
    held = sum(buffer.nbytes for buffer in packed.linear_cls(linear).buffers())
    assert packed.bits_per_weight == 4.5 == pytest.approx(8 * held / linear.weight.numel(), rel=0.01)
    assert resolve("nvfp4", "emulated", blackwell).bits_per_weight == 16
    assert resolve("fp8", "auto", blackwell).bits_per_weight == 8


def test_only_transformer_engine_breaks_compiled_graphs(hardware: Hardware) -> None:
    device = hardware("10.0", te=True)
    broken = [(p, name) for p, names in BACKENDS.items() for name in names if not resolve(p, name, device).fullgraph]
    assert broken == [("nvfp4", "auto"), ("nvfp4", "transformer_engine")]


@pytest.mark.parametrize(
    ("extension", "backend"),
    [
        (None, "torch"),  # the wheel of Python files alone
        ("transformer_engine/libtransformer_engine.so", "torch"),
        ("transformer_engine/wheel_lib/transformer_engine_torch.cpython-311-x86_64-linux-gnu.so", "transformer_engine"),
        ("transformer_engine/transformer_engine_torch.cpython-311-x86_64-linux-gnu.so", "transformer_engine"),
        ("transformer_engine_torch.cpython-311-x86_64-linux-gnu.so", "transformer_engine"),
    ],
)
def test_auto_selects_transformer_engine_only_with_pytorch_extension(
    hardware: Hardware, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extension: str | None, backend: str
) -> None:
    is_installed = transformer_engine.is_installed
    device = hardware("10.0")
    monkeypatch.setattr(transformer_engine, "is_installed", is_installed)
    spec = ModuleSpec("transformer_engine", None, origin=str(tmp_path / "transformer_engine" / "__init__.py"))
    monkeypatch.setattr(transformer_engine, "find_spec", {"transformer_engine": spec}.get)
    if extension is not None:
        (tmp_path / extension).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / extension).touch()
    assert resolve("nvfp4", "auto", device).name == backend
    monkeypatch.setattr(transformer_engine, "find_spec", {}.get)
    assert resolve("nvfp4", "auto", device).name == "torch"


def test_bf16_quantises_no_layer() -> None:
    assert resolve("bf16", "auto", CPU).linear_cls is None


@pytest.mark.parametrize(
    ("capability", "options", "precision", "backend", "expected"),
    [
        (
            "",
            {},
            "nvfp4",
            "transformer_engine",
            "it needs an NVIDIA GPU of compute capability 10.0 or higher and Transformer Engine with its extension for "
            "PyTorch (pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9', with nvcc); found: a CPU "
            "without INT8 units, Transformer Engine not installed. Use precision.backend=emulated (the same numbers, "
            "without the speed) or precision=bf16.",
        ),
        (
            "10.0",
            {},
            "nvfp4",
            "transformer_engine",
            "found: NVIDIA Test (compute capability 10.0), Transformer Engine not installed. Use "
            "precision.backend=torch, precision.backend=emulated",
        ),
        (
            "9.0",
            {"te": True},
            "nvfp4",
            "torch",
            "found: NVIDIA Test (compute capability 9.0). Use precision.backend=emulated (the same numbers, without "
            "the speed), precision=fp8 or precision=bf16.",
        ),
        ("8.0", {}, "fp8", "torch", "needs an NVIDIA GPU of compute capability 8.9 or higher; found: NVIDIA Test"),
        ("", {}, "int8", "torch", "8.0 or higher or a CPU with INT8 units (AVX512-VNNI); found: a CPU without INT8"),
    ],
)
def test_unsupported_backend_error_names_hardware_and_alternatives(
    hardware: Hardware, capability: str, options: dict[str, bool], precision: str, backend: str, expected: str
) -> None:
    device = hardware(capability, **options)
    with pytest.raises(UserError) as error:
        resolve(precision, backend, device)
    assert str(error.value).startswith(f"precision.backend={backend} is invalid: with precision={precision} it needs ")
    assert expected in str(error.value)


def test_unknown_precision_or_backend_error_lists_known_ones() -> None:
    with pytest.raises(UserError, match="precision=fp4 is invalid: it must be one of nvfp4, fp8, int8, bf16"):
        resolve("fp4", "auto", CPU)
    with pytest.raises(
        UserError, match="backend=cuda is invalid: with precision=nvfp4 it must be one of auto, transfor"
    ):
        resolve("nvfp4", "cuda", CPU)
    with pytest.raises(
        UserError, match="backend=transformer_engine is invalid: with precision=int8 it must be one of auto, torch"
    ):
        resolve("int8", "transformer_engine", CPU)


def test_names_that_are_checked_early_are_those_of_the_implementations() -> None:
    native = {precision: ("auto", *names, "emulated") for precision, names in backends._NATIVE.items()}
    assert native | {"bf16": ("auto",)} == BACKENDS
