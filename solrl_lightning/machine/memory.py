"""Handling of out-of-memory errors, the memory of a device, and the peak memory of this process."""

import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from solrl_lightning.machine.control_groups import GROUPS, MOUNTS, limits

T = TypeVar("T")


def retry_with_empty_cache(work: Callable[[], T]) -> T:
    """Return ``work()``, called a second time with an empty allocator cache if it runs out of memory.

    PyTorch's caching allocator reserves freed blocks for the stream that allocated them until the cache is emptied.
    """
    try:
        return work()
    except torch.OutOfMemoryError:
        pass  # the exception's traceback keeps the failed call's tensors alive inside the handler
    torch.cuda.empty_cache()
    return work()


@contextmanager
def visiting(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Have the modules, whose weights do not change, on ``device``; afterwards they get their former tensors again.

    ``module.to`` would copy the weights back.
    """
    parts = [part for module in modules for part in module.modules()]
    owners: list[dict[str, Any]] = [owner for part in parts for owner in (part._parameters, part._buffers)]
    former = [
        (owner, name, tensor, tensor.data) for owner in owners for name, tensor in owner.items() if tensor is not None
    ]
    try:
        for module in modules:
            module.to(device)
        yield
    finally:
        for owner, name, tensor, data in former:
            tensor.data = data
            owner[name] = tensor


def peak_memory(device: torch.device) -> tuple[int, int | None]:
    """Return the peak bytes of this process and of the allocator's reserve, which only a GPU has.

    On a CPU they are the resident bytes, on a GPU the bytes of all tensors. The reserve is what a GPU must have: it
    adds cached blocks and fragmentation to the tensors.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, None


def total_memory(device: torch.device, groups: Path = GROUPS, mounts: Path = MOUNTS) -> int:
    """Return the bytes of the GPU, of the system, or of the limit of a container or job."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    texts = limits("memory", ("memory.max",), ("memory.limit_in_bytes",), groups, mounts)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(int(text) for text in texts if text != "max")])
