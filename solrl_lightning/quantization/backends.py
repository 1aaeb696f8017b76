"""From the user's `precision` and `precision.backend` to the layer class that runs the shadow, or a clear refusal."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch

from solrl_lightning.errors import UserError
from solrl_lightning.quantization import bf16
from solrl_lightning.quantization.emulated import NVFP4Linear, operand_dtype

BACKENDS = {"nvfp4": ("auto", "emulated", "transformer_engine"), "bf16": ("auto",)}


class Backend(NamedTuple):
    """A way to run the shadow's linear layers."""

    precision: str
    name: str
    linear_cls: type[NVFP4Linear] | None  # None: no layer is quantised
    line: str  # what the user reads at start


def resolve(precision: str, backend: str, device: torch.device) -> Backend:
    """`auto` takes the best backend on `device` and says so in its line; a named one is taken or refused."""
    if precision not in BACKENDS:
        raise UserError(f"precision must be one of {', '.join(BACKENDS)}; got {precision!r}.")
    if backend not in BACKENDS[precision]:
        known = ", ".join(BACKENDS[precision])
        raise UserError(f"precision.backend with precision={precision} must be one of {known}; got {backend!r}.")
    if precision == "bf16":
        return Backend("bf16", bf16.NAME, None, bf16.LINE)
    if backend == "transformer_engine":
        raise UserError(
            "precision.backend=transformer_engine needs an NVIDIA GPU of compute capability 10.0 or higher, the "
            "transformer_engine package, and a version of solrl_lightning that drives it, which this one does not; "
            f"found: {_found(device)}. Use precision.backend=emulated (the same numbers, without the speed) or "
            "precision=bf16."
        )
    operands = str(operand_dtype(device)).removeprefix("torch.")
    line = (
        f"precision.backend={backend}: NVFP4 is emulated on {device} with {operands} products; the numbers are those "
        "of the format, but it is neither faster nor smaller than BF16"
    )
    return Backend("nvfp4", "emulated", NVFP4Linear, line)


def _found(device: torch.device) -> str:
    hardware = f"device {device}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        hardware = f"{torch.cuda.get_device_name(device)} of compute capability {major}.{minor}"
    package = "installed" if find_spec("transformer_engine") else "not installed"
    return f"{hardware}, transformer_engine {package}"
