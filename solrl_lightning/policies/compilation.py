"""Whether transformers can be compiled on this machine, and compiling them block by block."""

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from solrl_lightning.errors import UserError


def can_compile(device: torch.device) -> bool:
    """Return whether there is a compiler: PyTorch includes the GPU's; the CPU needs the system's C++ compiler."""
    return device.type != "cpu" or any(map(shutil.which, ("g++", "clang++", "c++")))


def should_compile(key: str, what: str, wanted: bool | str, device: torch.device) -> tuple[bool, str]:
    """Return whether to compile, and the line to print. ``auto`` compiles on a GPU and runs eagerly on a CPU.

    Args:
        key: configuration key of ``wanted``.
        what: plural noun for the compiled parts, for messages.

    Raises:
        UserError: compilation is asked for and there is no C++ compiler for it.
    """
    if wanted == "auto":
        if device.type == "cuda":
            return True, f"{key}=auto: {what} are compiled on this GPU"
        return False, f"{key}=auto: {what} run eagerly on the CPU ({key}=true compiles them)"
    if wanted and not can_compile(device):
        raise UserError(
            f"{key}=true needs a C++ compiler on the CPU (g++ or clang++); none was found. Install one, or set "
            f"{key}=false."
        )
    return bool(wanted), f"{key}={str(wanted).lower()}: {what} {'are compiled' if wanted else 'run eagerly'}"


def compile_blocks(
    transformer: nn.Module, fullgraph: bool = True, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compiles the transformer block by block, for one fixed batch size: equal blocks share their compiled code.

    ``fullgraph=False`` lets layers of another library break a block into several graphs. ``compile_repeated_blocks`` of
    diffusers lists the blocks of FLUX.1, but not of SD3 and SANA.
    """
    for blocks in transformer.children():
        if isinstance(blocks, nn.ModuleList):
            for block in blocks:
                block.compile(fullgraph=fullgraph, dynamic=False, backend=backend)
