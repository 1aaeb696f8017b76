"""Rows of task=doctor about the machine and the files of a run. They need no model."""

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError, HTTPError
from torch.utils.collect_env import SystemEnv, get_env_info

from solrl_lightning.artifacts.tables import OK, WRONG, Row, judged
from solrl_lightning.machine.environment import cpu_name, versions

_TIMEOUT = 5.0  # seconds for an answer of the hub
# Lines of lscpu, and flags of instructions that a product of matrices is made of.
_CPU_LINES = re.compile(r"Architecture|Model name|CPU\(s\)|Socket|Core|Thread|L\d\w? cache|Flags")
_CPU_FLAGS = re.compile(r"(?:avx|fma|amx|asimd|sve|bf16|i8mm)\w*")


def check_machine() -> Iterator[Row]:
    """Yield the rows about software and hardware; ``machine`` has PyTorch's listing in ``measured``."""
    system: SystemEnv = get_env_info()
    gpus = (system.nvidia_gpu_models or "").splitlines()
    yield Row("machine", OK, "; ".join([system.os, cpu_name(), *gpus]), "", without_kernel(system))
    packages = versions()
    yield Row("packages", OK, _listed(packages), "", packages)
    names = ("transformer_engine", "transformer_engine_torch")
    installed = {name: next((each.version for each in metadata.distributions(name=name)), None) for name in names}
    yield judge_transformer_engine(installed)
    yield judge_cuda(system)


def without_kernel(system: SystemEnv) -> dict[str, Any]:
    """Return PyTorch's listing without the kernel's name, and of lscpu what tells how fast the CPU computes."""
    facts, lines = system._asdict(), []
    del facts["python_platform"]
    for line in (system.cpu_info or "").splitlines():
        name, colon, value = line.partition(":")
        if _CPU_LINES.match(name):
            values = filter(_CPU_FLAGS.fullmatch, value.split()) if name == "Flags" else [value.strip()]
            lines.append(f"{name}{colon} {' '.join(values)}")
    return facts | {"cpu_info": "\n".join(lines)}


def _listed(packages: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in packages.items())


def judge_transformer_engine(packages: Mapping[str, str | None]) -> Row:
    """Return the row on Transformer Engine. Its first package imports without the second, but cannot compute."""
    half = len({version is None for version in packages.values()}) > 1
    way_out = "pip install 'transformer-engine[pytorch]', which builds the missing one"
    expected = "both packages or none: the first needs the second"
    return judged("transformer engine", _listed(packages), way_out, dict(packages), expected, wrong=half)


def judge_cuda(system: SystemEnv) -> Row:
    """Return the row on CUDA: wrong if the driver sees a GPU and torch finds none."""
    built_for = system.cuda_compiled_version
    text = f"torch is built for {f'CUDA {built_for}' if built_for else 'the CPU only'}; "
    gpus, expected = "; ".join((system.nvidia_gpu_models or "").splitlines()), "torch finds a GPU where nvidia-smi does"
    text += f"driver {system.nvidia_driver_version} sees {gpus}" if gpus else "nvidia-smi sees no GPU"
    wrong = bool(gpus) and system.is_cuda_available != "True"
    newer = "a driver for that CUDA, or a torch that is built for an older one"
    way_out = f"{newer if built_for else 'a torch that is built for CUDA'}: https://pytorch.org/get-started"
    return judged("cuda", f"{text}{'; but torch finds none' * wrong}", way_out, None, expected, wrong=wrong)


def local_path(source: str) -> Path | None:
    """Return the folder or file of a local path or cached hub id; None if it is not on this machine."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    try:
        return Path(huggingface_hub.snapshot_download(source, local_files_only=True))
    except (OSError, HFValidationError):
        return None


def locate(key: str, source: str) -> Row:
    """Return the row on ``key=source``: wrong unless the files are on this machine or readable on the hub."""
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
