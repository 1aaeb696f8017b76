"""Workers that decode and score one chunk while the next one is sampled."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import TypeVar

import torch

T = TypeVar("T")
Submit = Callable[[Callable[[], T]], "Future[T]"]


def worker_of(device: torch.device) -> Callable[[], AbstractContextManager[Submit]]:
    """Return where images are scored: on a GPU in another thread, beside the sampling; else in the caller's."""
    return partial(background_worker, device) if device.type == "cuda" else inline_worker


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream per process; the caching allocator reuses a block only on the stream that allocated it."""
    return torch.cuda.Stream(device)


@contextmanager
def background_worker(device: torch.device) -> Iterator[Submit]:
    """Yield a function that submits work to one thread, which runs it in order.

    On a GPU the work runs on a separate stream after everything submitted to the caller's stream so far, and the future
    completes when the kernels have. The caller must keep the tensors alive that the work reads.
    """
    stream = _side_stream(device) if device.type == "cuda" else None

    def do(work: Callable[[], T], ready: torch.cuda.Event | None) -> T:
        on_stream: AbstractContextManager = nullcontext() if stream is None else torch.cuda.stream(stream)
        with torch.no_grad(), on_stream:  # torch keeps both settings per thread
            if stream is None or ready is None:
                return work()
            stream.wait_event(ready)
            result = work()
            stream.synchronize()
            return result

    def submit(work: Callable[[], T]) -> Future[T]:
        ready = None if stream is None else torch.cuda.current_stream(device).record_event()
        return worker.submit(do, work, ready)

    # A thread's current device is GPU 0, where leaving the context of a stream would make a CUDA context of every rank.
    settings = (None, ()) if stream is None else (torch.cuda.set_device, (device,))
    worker = ThreadPoolExecutor(1, "scoring", *settings)
    try:
        yield submit
    finally:
        worker.shutdown(cancel_futures=True)  # after an error, no queued chunk may reach a reward server


@contextmanager
def inline_worker() -> Iterator[Submit]:
    """Yield a function that runs the work at submission, in the calling thread."""

    def submit(work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(work())
        return future

    yield submit
