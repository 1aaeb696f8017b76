"""Work beside the sampling: while one chunk is decoded and scored, the next one is sampled."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
Submit = Callable[[Callable[[], T]], "Future[T]"]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: the caching allocator reuses a block only on the stream that it was allocated on."""
    return torch.cuda.Stream(device)


@contextmanager
def background_worker(device: torch.device) -> Iterator[Submit]:
    """Yields a function that hands work to one thread, which does it in the order given.

    On a GPU the thread has a stream of its own. It starts on what the caller's stream has computed when the work is
    handed over, and a result is there only when it is computed; the caller keeps alive the tensors that the work reads.
    """
    stream = _side_stream(device) if device.type == "cuda" else None

    def do(work: Callable[[], T], ready: torch.cuda.Event | None) -> T:
        own: AbstractContextManager = nullcontext() if stream is None else torch.cuda.stream(stream)
        with torch.no_grad(), own:  # both hold for a thread
            if stream is None or ready is None:
                return work()
            stream.wait_event(ready)
            result = work()
            stream.synchronize()
            return result

    def submit(work: Callable[[], T]) -> Future[T]:
        ready = None if stream is None else torch.cuda.current_stream(device).record_event()
        return worker.submit(do, work, ready)

    with ThreadPoolExecutor(max_workers=1) as worker:
        yield submit


@contextmanager
def inline_worker() -> Iterator[Submit]:
    """Yields a function that does the work when it is given."""

    def submit(work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(work())
        return future

    yield submit
