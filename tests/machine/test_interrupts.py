"""Signals of the processes that a user's code forks."""

import multiprocessing
import signal
import time
from types import FrameType


def test_a_forked_process_dies_of_sigterm_where_the_run_only_asks_for_its_end() -> None:
    def request(number: int, frame: FrameType | None) -> None: ...

    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    before = signal.signal(signal.SIGTERM, request)
    try:
        process.start()
        process.terminate()  # as a Pool does with its own at its end, and waits for them
        process.join(60)
        assert process.exitcode == -signal.SIGTERM and signal.getsignal(signal.SIGTERM) is request
    finally:
        process.kill()
        signal.signal(signal.SIGTERM, before)
