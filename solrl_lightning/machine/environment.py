"""Versions and hardware of a run, for its summary and its report."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from solrl_lightning import __version__

_PACKAGES = ("torch", "lightning", "diffusers", "transformers", "peft")


def versions() -> dict[str, str]:
    """Return the versions by package; this package and Python first."""
    project = {"solrl_lightning": __version__, "python": platform.python_version()}
    return project | {name: metadata.version(name) for name in _PACKAGES}


def machine(device: torch.device, devices: int) -> dict[str, Any]:
    """Name and number of the devices, and the CPU's cores and threads of torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {"device": name, "devices": devices, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def cpu_name() -> str:
    """Return the CPU's model; its architecture where the system has no /proc/cpuinfo."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {models[0]}" if models else f"CPU {platform.processor() or platform.machine()}"
