"""Whether transformers can be compiled on this machine, and compiling them block by block.

On a CPU compiled blocks have GELU by the logistic function, which Inductor vectorises better than the tanh.
"""

import math
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers.models import activations
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.policies.checkpointing import blocks_of

_MOST_VARIANTS = 64
"""Compiled variants of a kind of block that torch.compile may keep; a 65th is an error, as one per iteration would be.

All blocks of a kind, in all samplers, share one cache. It gets an entry for each sampler, memory layout of the inputs,
use of gradients, and batch size: up to 16 in a run, and 6 more after each halving of the batch.
"""


def can_compile(device: torch.device) -> bool:
    """Return whether this machine has what Inductor needs: a C++ compiler on a CPU.

    For a GPU, Triton builds its driver module: with $CC, gcc or clang, and with Python's headers.
    """
    if device.type == "cuda":
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        headers = sysconfig.get_path("include", "posix_prefix")  # Debian's default is another folder, without them
        return any(map(shutil.which, compilers)) and (Path(headers) / "Python.h").is_file()
    compiler = shlex.split(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    return bool(compiler) and shutil.which(compiler[0]) is not None


def should_compile(key: str, what: str, setting: bool | str, device: torch.device) -> tuple[bool, str]:
    """Return whether to compile, and the line to print. ``auto`` compiles on a GPU that can; a CPU runs eagerly.

    Args:
        key: configuration key of ``setting``.
        what: plural noun for the compiled parts, for messages.
    """
    on_gpu = device.type == "cuda"
    needed = (
        "a C compiler (gcc, clang or $CC) and Python.h for a GPU" if on_gpu else "a C++ compiler (g++ or $CXX) on a CPU"
    )
    install = "apt install gcc python3-dev" if on_gpu else "apt install g++"
    compiles = bool(setting) and (on_gpu or setting is True)
    how = "are compiled, which takes minutes at first" if compiles else "run eagerly"
    if setting == "auto" and not on_gpu:
        how += f" on the CPU ({key}=true compiles them)"
    if compiles and not can_compile(device):
        if setting is True:
            raise UserError(
                f"{key}=true is invalid: it needs {needed}, which this machine lacks. Run {install}, or set "
                f"{key}=false."
            )
        compiles, how = False, f"run eagerly, because compiling needs {needed}; {install}"
    return compiles, f"{key}={str(setting).lower()}: {what} {how}"


def compile_blocks(
    transformer: nn.Module, fullgraph: bool = True, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile the transformer block by block, for one fixed batch size: equal blocks share their compiled code.

    ``fullgraph=False`` lets layers of another library break a block into several graphs. ``compile_repeated_blocks`` of
    diffusers lists the blocks of FLUX.1, but not of SD3 and SANA.
    """
    from torch._dynamo import config  # takes a second to import
    from torch._inductor import config as inductor

    if next(transformer.parameters()).device.type == "cpu":
        use_logistic_gelu(transformer)
    config.optimize_ddp = False  # it splits blocks to reduce gradients early, which an iteration does once, at its end
    inductor.deterministic = torch.are_deterministic_algorithms_enabled()  # then it chooses no kernel by its time
    config.recompile_limit = max(config.recompile_limit, _MOST_VARIANTS)  # 8 by default; of this thread in torch 2.15
    for block in blocks_of(transformer):
        block.compile(fullgraph=fullgraph, dynamic=False, backend=backend)


class LogisticGELU(nn.GELU):
    """The tanh approximation of GELU as x * sigmoid(2 u), which is (1 + tanh(u)) / 2 * x and vectorises better."""

    def forward(self, x: Tensor) -> Tensor:
        return logistic_gelu(x)


class ProjectedLogisticGELU(activations.GELU):
    """As `LogisticGELU`, after a linear layer."""

    def gelu(self, gate: Tensor) -> Tensor:
        return logistic_gelu(gate)


def logistic_gelu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)


def use_logistic_gelu(transformer: nn.Module) -> None:
    """Replace the class of every tanh approximation of GELU in ``transformer``, in place."""
    for module in transformer.modules():
        if getattr(module, "approximate", None) == "tanh":
            if type(module) is nn.GELU:
                module.__class__ = LogisticGELU
            elif type(module) is activations.GELU:
                module.__class__ = ProjectedLogisticGELU
