"""From the user's `precision` and `precision.backend` to the layer class that runs the shadow, or a clear refusal.

A precision names the numbers, a backend what computes them. `transformer_engine` and `torch` (PyTorch's own scaled and
integer matrix products) need hardware that multiplies such numbers, and hold the weights packed; `emulated` gives the
same numbers anywhere with other units, neither faster nor smaller than BF16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from solrl_lightning.errors import UserError
from solrl_lightning.quantization import bf16, transformer_engine
from solrl_lightning.quantization.emulated import NVFP4Linear, operand_dtype
from solrl_lightning.quantization.fp8 import EmulatedFP8Linear, FP8Linear
from solrl_lightning.quantization.int8 import EmulatedINT8Linear, INT8Linear
from solrl_lightning.quantization.linear import QuantizedLinear
from solrl_lightning.quantization.packed import PackedNVFP4Linear
from solrl_lightning.quantization.transformer_engine import TransformerEngineLinear


class Backend(NamedTuple):
    """A way to run the shadow's linear layers."""

    precision: str
    name: str
    linear_cls: type[QuantizedLinear] | None  # None: no layer is quantised
    line: str  # what the user reads at start
    bits_per_weight: float  # held on the device for a weight of a quantised layer
    fullgraph: bool = True  # whether a block with such layers compiles into one graph


class _Real(NamedTuple):
    """A backend that computes in the precision itself."""

    linear_cls: type[QuantizedLinear]
    bits_per_weight: float
    capability: tuple[int, int]  # the least of an NVIDIA GPU
    cpu: bool = False  # also on a CPU with INT8 units
    fullgraph: bool = True


_REAL = {  # best first
    "nvfp4": {
        "transformer_engine": _Real(TransformerEngineLinear, 4.5, (10, 0), fullgraph=False),
        "torch": _Real(PackedNVFP4Linear, 4.5, (10, 0)),
    },
    "fp8": {"torch": _Real(FP8Linear, 8, (8, 9))},
    "int8": {"torch": _Real(INT8Linear, 8, (8, 0), cpu=True)},
}
_EMULATED: dict[str, type[QuantizedLinear]] = {
    "nvfp4": NVFP4Linear,
    "fp8": EmulatedFP8Linear,
    "int8": EmulatedINT8Linear,
}
_NAMES = {"nvfp4": "NVFP4", "fp8": "FP8", "int8": "INT8"}
BACKENDS = {precision: ("auto", *real, "emulated") for precision, real in _REAL.items()} | {"bf16": ("auto",)}


def resolve(precision: str, backend: str, device: torch.device) -> Backend:
    """`auto` takes the best backend on `device` and says so in its line; a named one is taken or refused."""
    if precision not in BACKENDS:
        raise UserError(f"precision must be one of {', '.join(BACKENDS)}; got {precision!r}.")
    if backend not in BACKENDS[precision]:
        known = ", ".join(BACKENDS[precision])
        raise UserError(f"precision.backend with precision={precision} must be one of {known}; got {backend!r}.")
    if precision == "bf16":
        return Backend("bf16", bf16.NAME, None, bf16.LINE, 16)
    real = _REAL[precision]
    if backend in real and not _runs(real[backend], device):
        raise UserError(_refusal(precision, backend, device))
    chosen = backend
    if backend == "auto":
        chosen = next((name for name, candidate in real.items() if _runs(candidate, device)), "emulated")
    if chosen == "emulated":
        bits = 8 * operand_dtype(device).itemsize
        return Backend(precision, chosen, _EMULATED[precision], _emulation_line(precision, backend, device), bits)
    found = real[chosen]
    line = (
        f"precision.backend={backend}: {_NAMES[precision]} by {chosen} on {describe(device)}, the weights of quantised "
        f"layers held in {found.bits_per_weight:g} bits"
    )
    if found.linear_cls is TransformerEngineLinear and not transformer_engine.has_row_scales():
        line += (
            "; the inputs of a batch share one scale, so a candidate's numbers depend a little on the others of its "
            "batch (Transformer Engine 2.16 gives each token a scale)"
        )
    return Backend(precision, chosen, found.linear_cls, line, found.bits_per_weight, found.fullgraph)


def describe(device: torch.device) -> str:
    """The hardware in words."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    if device.type == "cpu":
        return f"a CPU {'with' if has_int8_units() else 'without'} INT8 units"
    return str(device)


def has_int8_units() -> bool:
    """Whether this CPU has the integer instructions for which PyTorch's integer matrix product calls oneDNN.

    Without them it falls back to plain loops, some sixty times slower than an FP32 product.
    """
    return torch.backends.mkldnn.is_available() and bool(torch.cpu.get_capabilities().get("avx512_vnni", False))


def _runs(candidate: _Real, device: torch.device) -> bool:
    if candidate.linear_cls is TransformerEngineLinear and not transformer_engine.is_installed():
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= candidate.capability
    return device.type == "cpu" and candidate.cpu and has_int8_units()


def _faster(device: torch.device) -> list[str]:
    """Precisions with units of their own on `device`, fastest first."""
    return [p for p, real in _REAL.items() if any(_runs(candidate, device) for candidate in real.values())]


def _emulation_line(precision: str, backend: str, device: torch.device) -> str:
    operands = {torch.bfloat16: "BF16", torch.float32: "FP32"}[operand_dtype(device)]
    name, hardware = _NAMES[precision], "this CPU" if device.type == "cpu" else describe(device)
    line = (
        f"precision.backend={backend}: {name} is emulated by {operands} products on {hardware}: the shadow ranks "
        f"candidates as {name} does and costs no less time and memory than BF16"
    )
    faster = _faster(device) if backend == "auto" and device.type == "cuda" else []
    return f"{line} (precision={faster[0]} has units on this GPU)" if faster else line


def _refusal(precision: str, backend: str, device: torch.device) -> str:
    wanted = _REAL[precision][backend]
    needs = [f"an NVIDIA GPU of compute capability {wanted.capability[0]}.{wanted.capability[1]} or higher"]
    if wanted.cpu:
        needs[0] += " or a CPU with INT8 units (AVX512-VNNI)"
    found = describe(device)
    if wanted.linear_cls is TransformerEngineLinear:
        needs.append(f"Transformer Engine with its extension for PyTorch ({transformer_engine.INSTALL}, with nvcc)")
        found += f", Transformer Engine {'' if transformer_engine.is_installed() else 'not '}installed"
    other = next((name for name, candidate in _REAL[precision].items() if _runs(candidate, device)), "")
    ways = [f"precision.backend={other}"] if other else []
    ways += ["precision.backend=emulated (the same numbers, without the speed)"]
    ways += [f"precision={name}" for name in _faster(device) if name != precision][:1]
    return (
        f"precision.backend={backend} with precision={precision} needs {' and '.join(needs)}; found: {found}. "
        f"Use {', '.join(ways)} or precision=bf16."
    )
