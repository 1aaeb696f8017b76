"""Handling of out-of-memory errors, and the peak memory of this process."""

import resource
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

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


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
