"""Ctrl-C while a program loads its libraries ends it without a traceback; importing this module begins that time.

A terminal that is closed ends it as SIGTERM does.
"""

import os
import signal
import sys
import threading
from types import FrameType

_IN_MAIN = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
_HANDLER = signal.signal(signal.SIGINT, signal.SIG_DFL) if _IN_MAIN else None


def restore() -> None:
    """Make Ctrl-C a KeyboardInterrupt again, also where a shell has started the program in its background.

    SIGHUP becomes SIGTERM, unless nohup has made the program ignore it.
    """
    if _IN_MAIN:
        signal.signal(signal.SIGINT, signal.default_int_handler if _HANDLER is signal.SIG_IGN else _HANDLER)
    if _IN_MAIN and sys.platform != "win32" and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:  # the terminal is gone, and a line printed there would be an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    signal.raise_signal(signal.SIGTERM)
