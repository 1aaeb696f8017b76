"""Rows of task=doctor about the machine and the files of a run. They need no model."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import HFValidationError, HTTPError

from solrl_lightning import __version__
from solrl_lightning.artifacts.tables import OK, WRONG, Row
from solrl_lightning.policies.bf16 import has_fast_bf16_products
from solrl_lightning.quantization.backends import has_int8_units

_PACKAGES = ("torch", "lightning", "diffusers", "transformers", "peft", "huggingface-hub", "torchao", "triton")
_TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine_torch")
_TIMEOUT = 5.0  # seconds for an answer of the hub


def environment(run_dir: str) -> Iterator[Row]:
    """Yield the rows about software and hardware. They show whether there is a hub token, but not the token."""
    system = {"solrl_lightning": __version__, "Python": platform.python_version()}
    yield Row("system", OK, f"{_listed(system)}, {platform.platform()}", "", system)
    packages = versions(_PACKAGES)
    yield Row("packages", OK, _listed(packages), "", packages)
    yield judge_transformer_engine(versions(_TRANSFORMER_ENGINE))
    available = torch.cuda.is_available()
    yield judge_cuda(nvidia_smi(), torch.version.cuda, available)
    for number in range(torch.cuda.device_count() if available else 0):
        gpu = torch.cuda.get_device_properties(number)
        found = {"bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
        text = f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB, compute capability {found['capability']}"
        yield Row(f"gpu {number}", OK, text, "", found)
    units = {"BF16 units": has_fast_bf16_products(), "INT8 units": has_int8_units()}
    counts = {"cores": os.cpu_count(), "threads of torch": torch.get_num_threads()}
    cpu = {"instructions": torch.backends.cpu.get_cpu_capability()} | units | counts
    named = cpu | {name: "yes" if has_them else "no" for name, has_them in units.items()}
    yield Row("cpu", OK, ", ".join(f"{name}: {value}" for name, value in named.items()), "", cpu)
    cache = huggingface_hub.constants.HF_HUB_CACHE
    free = {"the run's folder": free_bytes(Path(run_dir)), "the hub's cache": free_bytes(Path(cache))}
    yield Row("disk", OK, ", ".join(f"{size / 1e9:.1f} GB free for {name}" for name, size in free.items()), "", free)
    yield Row("hub token", OK, "none" if huggingface_hub.get_token() is None else "present")


def _listed(found: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())


def versions(names: Sequence[str]) -> dict[str, str | None]:
    return {name: next((found.version for found in metadata.distributions(name=name)), None) for name in names}


def judge_transformer_engine(found: Mapping[str, str | None]) -> Row:
    """The row on Transformer Engine. Its first package imports without the second, but cannot compute."""
    half = len({version is None for version in found.values()}) > 1
    way_out = "pip install 'transformer-engine[pytorch]', which builds the missing one" if half else ""
    return Row("transformer engine", WRONG if half else OK, _listed(found), way_out, dict(found))


def nvidia_smi() -> list[str]:
    """Name, driver, memory and memory in use of each GPU that the driver sees."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines() if done.returncode == 0 else []


def judge_cuda(seen: Sequence[str], built_for: str | None, available: bool) -> Row:
    """The row on CUDA: compares GPUs ``seen`` by the driver with torch's CUDA (``built_for``, ``available``)."""
    found = f"torch is built for {f'CUDA {built_for}' if built_for else 'the CPU only'}; "
    found += f"the driver sees {'; '.join(seen)}" if seen else "nvidia-smi sees no GPU"
    measured = {"built_for": built_for, "driver": list(seen), "available": available}
    if not seen or available:
        return Row("cuda", OK, found, "", measured)
    newer = "a driver for that CUDA, or a torch that is built for an older one"
    way_out = f"{newer if built_for else 'a torch that is built for CUDA'}: https://pytorch.org/get-started"
    return Row("cuda", WRONG, f"{found}; but torch finds none", way_out, measured)


def free_bytes(folder: Path) -> int:
    """Free bytes on the file system of a folder. The folder need not exist."""
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free


def local_path(source: str) -> Path | None:
    """The folder or file of a local path or cached hub id; None if it is not on this machine."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    try:
        return Path(huggingface_hub.snapshot_download(source, local_files_only=True))
    except (OSError, HFValidationError):
        return None


def locate(key: str, source: str) -> Row:
    """The row on ``key=source``: wrong unless the files are on this machine or readable on the hub."""
    path = local_path(source)
    if path is not None:
        return Row("files", OK, f"{key}={source} is here: {path}")
    hub = huggingface_hub.HfApi()
    try:
        # auth_check has no time limit; model_info has one, and also answers for gated models.
        if hub.model_info(source, timeout=_TIMEOUT).gated:
            hub.auth_check(source)
    except (OSError, HTTPError, HFValidationError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        way_out = f"{key}=<folder>, or check name and network; `hf auth login` for a gated model"
        return Row("files", WRONG, f"{key}={source} is neither here nor readable on the hub: {reason}", way_out)
    return Row("files", OK, f"{key}={source} is on the hub: a run downloads it")
