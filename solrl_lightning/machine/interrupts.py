"""Ctrl-C while a program loads its libraries ends it without a traceback; importing this module begins that time.

A terminal that is closed and a limit of CPU seconds end it as SIGTERM does. A process that a reward or a callback
forks, as multiprocessing does, dies of SIGTERM: the handler of a run would ask for the run's end there.
"""

import errno
import io
import os
import select
import signal
import sys
import threading
from functools import partial
from types import FrameType
from typing import Any, TextIO

ENDING = threading.Event()
"""Set once a run has been asked to end, by SIGTERM: nothing should be waited for any more.

A handler in the main thread sets it, so only other threads may wait for it: both take its lock.
"""

_IN_MAIN = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
_HANDLER = signal.signal(signal.SIGINT, signal.SIG_DFL) if _IN_MAIN else None


def restore() -> None:
    """Make Ctrl-C a KeyboardInterrupt again, also where a shell has started the program in its background.

    SIGHUP and SIGXCPU become SIGTERM, unless nohup has made the program ignore the former.
    """
    if _IN_MAIN:
        signal.signal(signal.SIGINT, signal.default_int_handler if _HANDLER is signal.SIG_IGN else _HANDLER)
    if hasattr(os, "register_at_fork"):  # which Windows lacks
        # Blocked until then, a signal that comes at once kills, too.
        number, mask = signal.SIGTERM, signal.pthread_sigmask
        os.register_at_fork(before=partial(mask, signal.SIG_BLOCK, {number}))
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))
        unblock = partial(mask, signal.SIG_UNBLOCK, {number})
        os.register_at_fork(after_in_parent=unblock, after_in_child=unblock)
    for name in ("SIGHUP", "SIGXCPU") if _IN_MAIN and sys.platform != "win32" else ():
        if signal.getsignal(signal.Signals[name]) == signal.SIG_DFL:
            signal.signal(signal.Signals[name], _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGXCPU:  # comes again each second, unless the limit is raised
        import resource  # which Windows lacks

        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    signal.raise_signal(signal.SIGTERM)


class _Terminal(io.FileIO):
    """A terminal: once it is gone, as after `disown`, what is written goes nowhere."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return super().write(data)


def is_unread() -> bool:
    """Return whether the reader of the standard output or of the standard error has ended, as after ``| head``."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def lasting(stream: TextIO | None) -> TextIO:
    """Return ``stream``, or one in its place to which a program can write even if nobody reads it.

    The shell may have closed it (None), the terminal may go away, and a character may be missing in its encoding.
    """
    if stream is None:
        return open(os.devnull, "w")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
        if stream.isatty():
            terminal = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            return io.TextIOWrapper(terminal, stream.encoding, stream.errors, line_buffering=True)
    return stream
