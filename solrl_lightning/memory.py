"""Memory: a retry when a device runs out of it, and the peak of this process."""

import resource
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def retry_with_empty_cache(work: Callable[[], T]) -> T:
    """``work()``, called again with an empty allocator cache if the first call runs out of memory.

    PyTorch's caching allocator keeps a block for the stream that it was allocated on, so blocks that another stage
    freed count as used here until the cache is emptied.
    """
    try:
        return work()
    except torch.OutOfMemoryError:
        pass  # leave the handler first: the exception's traceback keeps the failed call's tensors alive
    torch.cuda.empty_cache()
    return work()


def peak_resident_bytes() -> int:
    """The most memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
