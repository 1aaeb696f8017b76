"""Workers that decode and score one chunk while the next one is sampled."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Submit = Callable[[Callable[[], T]], "Future[T]"]


def worker_of(device: torch.device) -> Callable[[], AbstractContextManager[Submit]]:
    """Return where images are scored: on a GPU in another thread, beside the sampling; else in the caller's."""
    return partial(background_worker, device) if device.type == "cuda" else inline_worker


@cache
def _thread_of(device: torch.device) -> tuple[ThreadPoolExecutor, torch.cuda.Stream | None]:
    """Return the one thread of the process that scores on a device, and its stream on a GPU.

    cuDNN's plans belong to a thread (PyTorch's pull request 103939): in a new one it times the convolutions of the
    decoder again. The caching allocator reuses a block only on the stream that allocated it.
    """
    if device.type != "cuda":
        return ThreadPoolExecutor(1, "scoring"), None
    # A thread's current device is GPU 0, where leaving the context of a stream would make a CUDA context of every rank.
    return ThreadPoolExecutor(1, "scoring", torch.cuda.set_device, (device,)), torch.cuda.Stream(device)


@contextmanager
def background_worker(device: torch.device) -> Iterator[Submit]:
    """Yield a function that submits work to the device's scoring thread, which runs it in order.

    On a GPU the work runs on a separate stream after everything submitted to the caller's stream so far, and the future
    completes when the kernels have. The caller must keep the tensors alive that the work reads. At the end, work that
    has begun is awaited, and other work is cancelled: after an error, no queued chunk may reach a reward server.
    """
    thread, stream = _thread_of(device)
    pending: set[Future[Any]] = set()

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
        future = thread.submit(do, work, ready)
        pending.add(future)
        future.add_done_callback(pending.discard)
        return future

    try:
        yield submit
    finally:
        for future in pending.copy():
            future.cancel()
        thread.submit(lambda: None).result()  # begins when the thread holds no tensor of the work before it


@contextmanager
def inline_worker() -> Iterator[Submit]:
    """Yield a function that runs the work at submission, in the calling thread."""

    def submit(work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(work())
        return future

    yield submit
