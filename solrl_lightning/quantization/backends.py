"""Choose the layer class that runs the shadow from `precision` and `precision.backend`.

A precision is a number format, a backend an implementation of it. `transformer_engine` and `torch` (PyTorch's scaled
and integer matrix products) need hardware that multiplies the format and store packed weights. `emulated` computes the
same numbers on any hardware, neither faster nor smaller than BF16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from solrl_lightning.errors import UserError
from solrl_lightning.precisions import check_backend
from solrl_lightning.quantization import transformer_engine
from solrl_lightning.quantization.linear import QuantizedLinear
from solrl_lightning.quantization.packed import PackedNVFP4Linear
from solrl_lightning.quantization.scaled_linear import EMULATED, FP8Linear, INT8Linear, operand_dtype
from solrl_lightning.quantization.transformer_engine import TransformerEngineLinear


class Backend(NamedTuple):
    """One implementation of the shadow's linear layers."""

    precision: str
    name: str
    linear_cls: type[QuantizedLinear] | None  # None: no layer is quantised
    description: str  # logged at start
    bits_per_weight: float  # stored on the device for each weight of a quantised layer
    fullgraph: bool = True  # whether a block with these layers compiles into one graph


class _NativeBackend(NamedTuple):
    """A backend whose hardware multiplies numbers of the precision."""

    linear_cls: type[QuantizedLinear]
    bits_per_weight: float
    capability: tuple[int, int]  # minimum compute capability of an NVIDIA GPU
    cpu: bool = False  # also runs on a CPU with INT8 units
    fullgraph: bool = True


_NATIVE = {  # best first
    "nvfp4": {
        "transformer_engine": _NativeBackend(TransformerEngineLinear, 4.5, (10, 0), fullgraph=False),
        "torch": _NativeBackend(PackedNVFP4Linear, 4.5, (10, 0)),
    },
    "fp8": {"torch": _NativeBackend(FP8Linear, 8, (8, 9))},
    "int8": {"torch": _NativeBackend(INT8Linear, 8, (8, 0), cpu=True)},
}
PACKED_BITS = {precision: next(iter(native.values())).bits_per_weight for precision, native in _NATIVE.items()}
PACKED_BITS |= {"bf16": 16}  # bits per weight where the hardware multiplies the format


def resolve(precision: str, backend: str, device: torch.device) -> Backend:
    """Return the named backend, or for `auto` the fastest one that runs on `device`.

    Raises:
        UserError: the precision or the backend is unknown, or the backend does not run on `device`.
    """
    check_backend(precision, backend)
    if precision == "bf16":
        return Backend("bf16", "none", None, "The shadow runs in BF16: no layer is quantised.", 16)
    native = _NATIVE[precision]
    if backend in native and not _runs(native[backend], device):
        raise UserError(_refusal(precision, backend, device))
    chosen = backend
    if backend == "auto":
        chosen = next((name for name, candidate in native.items() if _runs(candidate, device)), "emulated")
    if chosen == "emulated":
        description, bits = _emulation_description(precision, backend, device), 8 * operand_dtype(device).itemsize
        return Backend(precision, chosen, EMULATED[precision], description, bits)
    found = native[chosen]
    description = (
        f"precision.backend={backend}: {precision.upper()} by {chosen} on {describe(device)}, weights of quantised "
        f"layers stored in {found.bits_per_weight:g} bits"
    )
    return Backend(precision, chosen, found.linear_cls, description, found.bits_per_weight, found.fullgraph)


def describe(device: torch.device) -> str:
    """Return the name of the hardware and its abilities."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    if device.type == "cpu":
        return f"a CPU {'with' if has_int8_units() else 'without'} INT8 units"
    return str(device)


def has_int8_units() -> bool:
    """Return whether this CPU has the instructions (AVX512-VNNI) with which `torch._int_mm` calls oneDNN.

    Without them `torch._int_mm` runs plain loops, about sixty times slower than an FP32 product.
    """
    return torch.backends.mkldnn.is_available() and bool(torch.cpu.get_capabilities().get("avx512_vnni", False))


def _runs(candidate: _NativeBackend, device: torch.device) -> bool:
    if candidate.linear_cls is TransformerEngineLinear and not transformer_engine.is_installed():
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= candidate.capability
    return device.type == "cpu" and candidate.cpu and has_int8_units()


def _faster(device: torch.device) -> list[str]:
    """Return the precisions with a native backend on `device`, fastest first."""
    return [p for p, native in _NATIVE.items() if any(_runs(candidate, device) for candidate in native.values())]


def _emulation_description(precision: str, backend: str, device: torch.device) -> str:
    operands = {torch.bfloat16: "BF16", torch.float32: "FP32"}[operand_dtype(device)]
    name, hardware = precision.upper(), "this CPU" if device.type == "cpu" else describe(device)
    description = (
        f"precision.backend={backend}: {name} is emulated by {operands} products on {hardware}: the shadow ranks "
        f"candidates as {name} does and costs no less time and memory than BF16"
    )
    faster = _faster(device) if backend == "auto" and device.type == "cuda" else []
    return f"{description} (precision={faster[0]} is native on this GPU)" if faster else description


def _refusal(precision: str, backend: str, device: torch.device) -> str:
    wanted = _NATIVE[precision][backend]
    needs = [f"an NVIDIA GPU of compute capability {wanted.capability[0]}.{wanted.capability[1]} or higher"]
    if wanted.cpu:
        needs[0] += " or a CPU with INT8 units (AVX512-VNNI)"
    found = describe(device)
    if wanted.linear_cls is TransformerEngineLinear:
        needs.append(f"Transformer Engine with its extension for PyTorch ({transformer_engine.INSTALL}, with nvcc)")
        found += f", Transformer Engine {'' if transformer_engine.is_installed() else 'not '}installed"
    other = next((name for name, candidate in _NATIVE[precision].items() if _runs(candidate, device)), "")
    ways = [f"precision.backend={other}"] if other else []
    ways += ["precision.backend=emulated (the same numbers, without the speed)"]
    ways += [f"precision={name}" for name in _faster(device) if name != precision][:1]
    return (
        f"precision.backend={backend} is invalid: with precision={precision} it needs {' and '.join(needs)}; "
        f"found: {found}. Use {', '.join(ways)} or precision=bf16."
    )
