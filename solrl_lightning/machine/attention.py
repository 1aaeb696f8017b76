"""Which kernels PyTorch's attention may take on a GPU.

| passes | with FlashAttention 4 (flash-attn-4), on compute capability 9.x and 10.x | without |
|---|---|---|
| that nothing is differentiated through | that | what PyTorch prefers: cuDNN from 9.0 on, else flash |
| of training | that | flash; with a mask, the efficient one |

No gradient comes from cuDNN: its backward pass fails on 10.x, and returns NaN for layouts and masks that differ between
its versions (diffusers issue 9768, PyTorch issue 196678, dev/measurements/h100.md). The row `attention` of task=doctor
compares the kernels.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn import attention

log = logging.getLogger(__name__)

_IMPLEMENTATION = "FA4"
_MAJORS = (9, 10)  # of the compute capabilities that FlashAttention 4 runs on (torch/nn/attention/_fa4.py)


def is_installed() -> bool:
    """Return whether FlashAttention 4 is, and a torch that takes it."""
    spec = find_spec("flash_attn")
    folders = [] if spec is None else map(Path, spec.submodule_search_locations or ())
    return any((folder / "cute").is_dir() for folder in folders) and hasattr(attention, "activate_flash_attention_impl")


def takes_fa4(device: torch.device) -> bool:
    """Return whether attention is FlashAttention 4's on ``device``, a GPU."""
    return torch.cuda.get_device_capability(device)[0] in _MAJORS and is_installed()


def prepare(device: torch.device) -> None:
    """Choose the kernels of this process."""
    if takes_fa4(device) and attention.current_flash_attention_impl() is None:
        attention.activate_flash_attention_impl(_IMPLEMENTATION)
        log.info("attention: FlashAttention 4 (pip uninstall flash-attn-4 for PyTorch's kernels)")
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def without_gradients(device: torch.device) -> Iterator[None]:
    """Allow cuDNN in passes that nothing is differentiated through.

    A compiled graph keeps the kernel that it was traced with; graphs with and without gradients are separate.
    """
    if device.type != "cuda" or takes_fa4(device):
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)
