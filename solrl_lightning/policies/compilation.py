"""Whether rollouts can be compiled on this machine, and compiling them block by block."""

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from solrl_lightning.errors import UserError
from solrl_lightning.policies.gelu import use_logistic_gelu


def can_compile(device: torch.device) -> bool:
    """Whether there is a compiler: PyTorch brings that of a GPU, the system's C++ compiler is that of the CPU."""
    return device.type != "cpu" or any(map(shutil.which, ("g++", "clang++", "c++")))


def should_compile(wanted: bool | str, device: torch.device) -> tuple[bool, str]:
    """(decision, the line to print). ``auto`` compiles on a GPU and runs eagerly on a CPU.

    Raises:
        UserError: compilation is asked for and there is no C++ compiler for it.
    """
    if wanted == "auto":
        if device.type == "cuda":
            return True, "family.compile=auto: rollouts are compiled on this GPU"
        return False, "family.compile=auto: rollouts run eagerly on the CPU (family.compile=true compiles them)"
    if wanted and not can_compile(device):
        raise UserError(
            "family.compile=true needs a C++ compiler on the CPU (g++ or clang++); none was found. Install one, or set "
            "family.compile=false."
        )
    return bool(wanted), f"family.compile={str(wanted).lower()}: rollouts {'are compiled' if wanted else 'run eagerly'}"


def compile_blocks(
    transformer: nn.Module, fullgraph: bool = True, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compiles the transformer block by block, for one fixed batch size: equal blocks share their compiled code.

    ``fullgraph=False`` lets layers of another library break a block into several graphs. ``compile_repeated_blocks`` of
    diffusers knows the blocks of FLUX.1 but not those of SD3 and SANA.
    """
    if next(transformer.parameters()).device.type == "cpu":
        use_logistic_gelu(transformer)
    for blocks in transformer.children():
        if isinstance(blocks, nn.ModuleList):
            for block in blocks:
                block.compile(fullgraph=fullgraph, dynamic=False, backend=backend)
