"""Choose the layer class that runs the shadow from `precision` and `precision.backend`.

A precision is a number format, a backend an implementation of it. `transformer_engine` and `torch` (PyTorch's scaled
and integer matrix products) need hardware that multiplies the format and store packed weights. `emulated` computes the
same numbers on any hardware, neither faster nor smaller than BF16. ``precision=auto`` is the first of ``FORMATS`` that
the hardware multiplies.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from solrl_lightning.errors import UserError
from solrl_lightning.names import AUTO, BACKENDS, check_backend
from solrl_lightning.quantization.formats import FORMATS, NativeBackend
from solrl_lightning.quantization.linear import QuantizedLinear
from solrl_lightning.quantization.scaled_linear import operand_dtype


class Backend(NamedTuple):
    """One implementation of the shadow's linear layers."""

    precision: str
    name: str
    linear_cls: type[QuantizedLinear] | None  # None: no layer is quantised
    description: str  # logged at start
    bits_per_weight: float  # stored on the device for each weight of a quantised layer
    fullgraph: bool = True  # whether a block with these layers compiles into one graph


class Hardware(NamedTuple):
    """What the choice of a precision and of its backend depends on."""

    name: str  # in messages
    type: str = "cuda"  # of torch.device
    capability: tuple[int, int] = (0, 0)  # compute capability of an NVIDIA GPU
    packages: frozenset[str] = frozenset()  # keys of PACKAGES: those installed with their extensions
    int8_units: bool = False  # of a CPU
    emulation_dtype: torch.dtype = torch.bfloat16  # of the operands of emulated products


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed with its extension for PyTorch, without which its import fails.

    The extension is a file in the folder of the Python package or in its parent that ``find_spec`` does not find.
    """
    spec = find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return False
    beside = Path(spec.origin).parents[1]
    patterns = ("transformer_engine_torch*.so", "transformer_engine/**/transformer_engine_torch*.so")
    return any(any(beside.glob(pattern)) for pattern in patterns)


INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9'"
PACKAGES = {"transformer_engine": ("Transformer Engine", INSTALL)}
"""Optional packages of backends: key -> name in messages, and how to install it."""

PACKED_BITS = {name: next((n.bits_per_weight for n in each.native.values()), 16) for name, each in FORMATS.items()}
PACKED_BITS |= {"bf16": 16}  # bits per weight where the hardware multiplies the format


def choose_precision(hardware: Hardware) -> str:
    """Return what ``precision=auto`` is: the first of ``FORMATS`` that ``hardware`` multiplies, else bf16.

    On a CPU it is nvfp4, emulated, so that a run of the embedded model ranks as NVFP4 does and is the same on each.
    """
    return "nvfp4" if hardware.type == "cpu" else next(iter(_native_precisions(hardware)), "bf16")


def resolve(precision: str, backend: str, device: torch.device | Hardware) -> Backend:
    """Return the named backend, or for `auto` the fastest one that runs on `device`.

    Raises:
        UserError: the precision or the backend is unknown, or the backend does not run on `device`.
    """
    check_backend(precision, backend)
    if precision == "bf16":
        return Backend("bf16", "none", None, "The shadow runs in BF16: no layer is quantised.", 16)
    hardware = device if isinstance(device, Hardware) else hardware_of(device)
    option = f"precision={AUTO}" if (precision, backend) == (AUTO, AUTO) else f"precision.backend={backend}"
    if precision == AUTO:
        precision = choose_precision(hardware)
        check_backend(precision, backend)
        if precision == "bf16":
            description = (
                f"{option}: the shadow runs in BF16, because {hardware.name} multiplies none of "
                f"{', '.join(name.upper() for name in FORMATS)}. Without a shadow, family=prefix or family=race "
                "explores in less time and memory."
            )
            return Backend("bf16", "none", None, description, 16)
    native = FORMATS[precision].native
    if backend in native and not _runs(native[backend], hardware):
        raise UserError(_refusal(precision, backend, hardware))
    name = backend
    if backend == AUTO:
        name = next((name for name, candidate in native.items() if _runs(candidate, hardware)), "emulated")
    if name == "emulated":
        description = f"{option}: {_emulation_description(precision, backend, hardware)}"
        bits = 8 * hardware.emulation_dtype.itemsize
        return Backend(precision, name, FORMATS[precision].emulated, description, bits)
    chosen = native[name]
    description = (
        f"{option}: {precision.upper()} by {name} on {hardware.name}, weights of quantised "
        f"layers stored in {chosen.bits_per_weight:g} bits"
    )
    return Backend(precision, name, chosen.layer(), description, chosen.bits_per_weight, chosen.fullgraph)


def resolve_from(ckpt: str | Path | None, precision: str, backend: str, device: torch.device) -> Backend:
    """Return the backend of a run that continues from ``ckpt``; with ``precision=auto`` the precision is its run's."""
    if precision != AUTO or ckpt is None:
        return resolve(precision, backend, device)
    recorded, here = recorded_precision(ckpt), choose_precision(hardware_of(device))
    if recorded in (AUTO, here):
        return resolve(AUTO, backend, device)
    resolved = resolve(recorded, backend, device)
    note = f"precision={AUTO}: {recorded}, in which the run of the checkpoint began; a new run here would take {here}. "
    return resolved._replace(description=note + resolved.description)


def recorded_precision(ckpt: str | Path) -> str:
    """Return the precision of the run that wrote a checkpoint; "auto" if it had no shadow."""
    from solrl_lightning.artifacts.files import read_checkpoint  # imports Lightning

    # A checkpoint without the entry is of a version whose default was nvfp4.
    recorded = str(read_checkpoint(ckpt).get("precision_backend", "nvfp4")).partition(" ")[0]
    return recorded if recorded in BACKENDS else AUTO


def hardware_of(device: torch.device) -> Hardware:
    """Return the properties of a device of this machine."""
    dtype = operand_dtype(device)
    packages = frozenset(PACKAGES if has_transformer_engine() else ())
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]})"
        return Hardware(name, "cuda", capability, packages, emulation_dtype=dtype)
    if device.type == "cpu":
        # With AVX512-VNNI `torch._int_mm` calls oneDNN; without it runs plain loops, sixty times slower than FP32.
        units = torch.backends.mkldnn.is_available() and bool(torch.cpu.get_capabilities().get("avx512_vnni"))
        name = f"a CPU {'with' if units else 'without'} INT8 units"
        return Hardware(name, "cpu", (0, 0), packages, units, dtype)
    return Hardware(str(device), device.type, emulation_dtype=dtype)


def _runs(candidate: NativeBackend, hardware: Hardware) -> bool:
    if candidate.package and candidate.package not in hardware.packages:
        return False
    if hardware.type == "cuda":
        return hardware.capability >= candidate.capability
    return hardware.type == "cpu" and candidate.cpu and hardware.int8_units


def _native_precisions(hardware: Hardware) -> list[str]:
    """Return the precisions with a native backend on ``hardware``, in the order of ``FORMATS``."""
    return [name for name, each in FORMATS.items() if any(_runs(native, hardware) for native in each.native.values())]


def _emulation_description(precision: str, backend: str, hardware: Hardware) -> str:
    operands = {torch.bfloat16: "BF16", torch.float32: "FP32"}[hardware.emulation_dtype]
    on_cpu, name = hardware.type == "cpu", precision.upper()
    cost = "saves neither time nor memory" if on_cpu else "is slower than BF16 and takes no less memory"
    description = (
        f"{name} is emulated by {operands} products on {'this CPU' if on_cpu else hardware.name}: the shadow ranks "
        f"candidates as {name} does and {cost}"
    )
    faster = _native_precisions(hardware) if backend == AUTO and hardware.type == "cuda" else []
    return f"{description} (precision={faster[0]} is native on this GPU)" if faster else description


def _refusal(precision: str, backend: str, hardware: Hardware) -> str:
    refused = FORMATS[precision].native[backend]
    needs = [f"an NVIDIA GPU of compute capability {refused.capability[0]}.{refused.capability[1]} or higher"]
    if refused.cpu:
        needs[0] += " or a CPU with INT8 units (AVX512-VNNI)"
    present = hardware.name
    if refused.package:
        title, install = PACKAGES[refused.package]
        needs.append(f"{title} with its PyTorch extension (docs/precision.md: {install})")
        present += f", {title} {'' if refused.package in hardware.packages else 'not '}installed"
    return (
        f"precision.backend={backend} is invalid: with precision={precision} it needs {' and '.join(needs)}; "
        f"found: {present}. Leave it out for the fastest one here, or use precision.backend=emulated (the same "
        "numbers, without the speed) or precision=auto."
    )
