"""The choice of a backend by precision and hardware, its description, and the errors."""

import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from solrl_lightning.errors import UserError
from solrl_lightning.names import BACKENDS
from solrl_lightning.quantization import backends, resolve, resolve_from
from solrl_lightning.quantization.backends import Backend, Hardware, choose_precision, hardware_of
from solrl_lightning.quantization.first_run import first_run
from solrl_lightning.quantization.formats import FORMATS

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
OnHardware = Callable[..., torch.device]


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> OnHardware:
    """Return a function: hardware("10.0") is an NVIDIA GPU of that compute capability, hardware("") the CPU."""

    def on(capability: str, te: bool = False, vnni: bool = False) -> torch.device:
        pair = tuple(map(int, capability.split("."))) if capability else (0, 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pair)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": vnni})
        monkeypatch.setattr(backends, "has_transformer_engine", lambda: te)
        return GPU if capability else CPU

    return on


@pytest.mark.parametrize(
    ("capability", "options", "names"),
    [
        ("", {}, ("emulated", "emulated", "emulated")),
        ("", {"vnni": True}, ("emulated", "emulated", "torch")),
        ("7.5", {}, ("emulated", "emulated", "emulated")),
        ("8.0", {}, ("emulated", "emulated", "torch")),
        ("8.9", {"te": True}, ("emulated", "torch", "torch")),
        ("10.0", {}, ("torch", "torch", "torch")),
        ("10.0", {"te": True}, ("torch", "torch", "torch")),
    ],
)
def test_auto_selects_fastest_supported_backend(
    hardware: OnHardware, capability: str, options: dict[str, bool], names: tuple[str, ...]
) -> None:
    device = hardware(capability, **options)
    chosen = [resolve(precision, "auto", device) for precision in ("nvfp4", "fp8", "int8")]
    assert tuple(backend.name for backend in chosen) == names
    assert all(backend.description.count("precision.backend=auto: ") == 1 for backend in chosen)
    assert not any("\n" in backend.description for backend in chosen)


@pytest.mark.parametrize(
    ("capability", "precision", "name", "bits"),
    [
        ("", "nvfp4", "emulated", 32),
        ("", "fp8", "emulated", 32),
        ("", "int8", "emulated", 32),
        ("", "int8", "torch", 8),
        ("10.0", "nvfp4", "torch", 4.5),
    ],
)
def test_bits_per_weight_match_layer_buffers(
    hardware: OnHardware, capability: str, precision: str, name: str, bits: float
) -> None:
    linear, backend = nn.Linear(512, 256, bias=False), resolve(precision, name, hardware(capability, vnni=True))
    size = sum(buffer.nbytes for buffer in backend.linear_cls(linear).buffers())
    assert backend.bits_per_weight == bits == pytest.approx(8 * size / linear.weight.numel(), rel=0.01)  # and scales


def test_bits_per_weight_on_a_gpu(hardware: OnHardware) -> None:
    device = hardware("10.0")
    assert resolve("nvfp4", "emulated", device).bits_per_weight == 16
    assert resolve("fp8", "auto", device).bits_per_weight == 8
    bf16 = resolve("bf16", "auto", device)
    assert bf16.bits_per_weight == 16 and bf16.linear_cls is None


def test_only_transformer_engine_breaks_compiled_graphs(hardware: OnHardware) -> None:
    device, names = hardware("10.0", te=True), [(p, name) for p, names in BACKENDS.items() for name in names]
    broken = [name for name in names if not resolve(*name, device).fullgraph]
    assert broken == [("nvfp4", "transformer_engine")]


@pytest.mark.parametrize(
    ("extension", "installed"),
    [
        (None, False),  # the wheel of Python files alone
        ("transformer_engine/wheel_lib/transformer_engine_torch.cpython-311-x86_64-linux-gnu.so", True),
        ("transformer_engine/transformer_engine_torch.cpython-311-x86_64-linux-gnu.so", True),
    ],
)
def test_transformer_engine_needs_its_pytorch_extension(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extension: str | None, installed: bool
) -> None:
    spec = ModuleSpec("transformer_engine", None, origin=str(tmp_path / "transformer_engine" / "__init__.py"))
    monkeypatch.setattr(backends, "find_spec", {"transformer_engine": spec}.get)
    if extension is not None:
        (tmp_path / extension).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / extension).touch()
    assert backends.has_transformer_engine() is installed
    monkeypatch.setattr(backends, "find_spec", {}.get)
    assert not backends.has_transformer_engine()


@pytest.mark.parametrize(
    ("capability", "precision", "backend", "expected"),
    [
        ("10.0", "nvfp4", "transformer_engine", "Transformer Engine not installed. Leave it out"),
        ("8.0", "fp8", "torch", "needs an NVIDIA GPU of compute capability 8.9 or higher; found: NVIDIA Test"),
        ("", "int8", "torch", "8.0 or higher or a CPU with INT8 units (AVX512-VNNI); found: a CPU without INT8"),
    ],
)
def test_unsupported_backend_error_names_hardware_and_alternatives(
    hardware: OnHardware, capability: str, precision: str, backend: str, expected: str
) -> None:
    with pytest.raises(UserError) as error:
        resolve(precision, backend, hardware(capability))
    assert str(error.value).startswith(f"precision.backend={backend} is invalid: with precision={precision} it needs ")
    assert expected in str(error.value)


def test_documented_table_is_what_each_machine_gets() -> None:
    page, readme = ((Path(__file__).parents[2] / name).read_text() for name in ("docs/precision.md", "README.md"))
    first = page[page.index("| hardware") :].partition("\n\n")[0]
    table = [line.strip("| ").split(" | ") for line in first.splitlines() if "`" in line]
    header, *rows = table
    assert header[1:] == ["first run", "`auto`", "`nvfp4`", "`fp8`", "`int8`"]
    machines = ", ".join(row[0] for row in rows)
    assert all(name in machines for name in ("CPU", "A100", "H100", "RTX 40", "L40S", "RTX 50", "B200"))
    for machine, advice, *cells in rows:
        match = re.search(r"\((\d+)\.(\d)\)", machine)
        kind = Hardware(machine, capability=(int(match[1]), int(match[2]))) if match else Hardware(machine, "cpu")
        chosen, *expected = (cell.split()[0].strip("`,") for cell in cells)
        assert choose_precision(kind) == chosen, machine
        assert f"`{' '.join(first_run(kind).options)}`" == advice, machine
        best = kind._replace(packages=frozenset(backends.PACKAGES), int8_units=True)
        assert choose_precision(best) == chosen, machine
        names = [resolve(precision, "auto", best).name for precision in ("nvfp4", "fp8", "int8")]
        assert names == expected, machine
    # The README's table of families has the same in its last column.
    first_on = {
        match[1]: match[2] for match in re.finditer(r"^\| `(\w+)`.*\| first run: ([^|]+) \|$", readme, re.MULTILINE)
    }
    with_units = {row[0].split(" (")[0] for row in rows if "sol_rl" in row[1]}
    assert first_on.keys() == {"sol_rl", "prefix"} and first_on["prefix"] == "other GPUs"
    gpus = first_on["sol_rl"].removesuffix("; on a CPU to see the method").split(", ")
    assert {name.split(", RTX PRO")[0] for name in with_units} == {*gpus, "CPU"}
    assert all("prefix" in row[1] for row in rows if row[0].split(" (")[0] not in with_units)
    assert first_run(Hardware("", capability=(10, 0)), shadow_fits=False).options == ["family=prefix"]


@pytest.mark.parametrize(
    ("capability", "precision", "message"),
    [
        ("", "nvfp4", "precision=auto: NVFP4 is emulated by FP32 products on this CPU: the shadow ranks candidates as"),
        ("7.5", "bf16", "(compute capability 7.5) multiplies none of NVFP4, FP8, INT8. Without a shadow"),
        ("8.0", "int8", "precision=auto: INT8 by torch on NVIDIA Test (compute capability 8.0), weights"),
    ],
)
def test_auto_is_the_lowest_precision_that_the_hardware_multiplies(
    hardware: OnHardware, monkeypatch: pytest.MonkeyPatch, capability: str, precision: str, message: str
) -> None:
    monkeypatch.setattr(backends, "operand_dtype", lambda device: torch.bfloat16 if capability else torch.float32)
    device = hardware(capability, vnni=True)
    chosen = resolve("auto", "auto", device)
    assert chosen.precision == choose_precision(hardware_of(device)) == precision
    assert message in chosen.description and "\n" not in chosen.description
    by_name = resolve(precision, "auto", device)
    assert chosen._replace(description="") == by_name._replace(description="")


def test_auto_precision_accepts_backends_of_the_chosen_one(hardware: OnHardware) -> None:
    chosen = resolve("auto", "emulated", hardware("9.0"))
    assert (chosen.precision, chosen.name) == ("fp8", "emulated")
    assert chosen.description.startswith("precision.backend=emulated: FP8 is emulated")
    with pytest.raises(UserError, match="with precision=fp8 it must be one of auto, torch, emulated"):
        resolve("auto", "transformer_engine", hardware("9.0"))


def test_resumed_run_keeps_the_precision_that_auto_chose_at_its_start(hardware: OnHardware, tmp_path: Path) -> None:
    parts: dict[str, Any] = {"global_step": 1, "state_dict": {}, "callbacks": {}, "loops": {}, "optimizer_states": []}
    file, device = tmp_path / "last.ckpt", hardware("9.0")

    def resumed(recorded: str | None, precision: str = "auto") -> Backend:
        torch.save(parts | ({"precision_backend": recorded} if recorded else {}), file)
        return resolve_from(file, precision, "auto", device)

    moved = resumed("nvfp4 (transformer_engine)")
    assert (moved.precision, moved.name) == ("nvfp4", "emulated")
    note = "precision=auto: nvfp4, in which the run of the checkpoint began; a new run here would take fp8. "
    assert moved.description == note + resolve("nvfp4", "auto", device).description
    assert resumed(None).precision == "nvfp4"  # of a version whose default it was
    fresh = resolve("auto", "auto", device)
    assert resumed("fp8 (torch)") == resumed("no shadow") == resolve_from(None, "auto", "auto", device) == fresh
    assert resumed("nvfp4 (torch)", "int8") == resolve("int8", "auto", device)


def test_names_are_those_of_the_implementations() -> None:
    native = {name: ("auto", *each.native, "emulated") for name, each in FORMATS.items()}
    assert native | {"bf16": ("auto",)} == BACKENDS
