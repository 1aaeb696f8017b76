"""Handling of out-of-memory errors."""

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
