"""Ctrl-C while a program loads its libraries ends it without a traceback; importing this module begins that time."""

import signal
import threading

_IN_MAIN = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
_HANDLER = signal.signal(signal.SIGINT, signal.SIG_DFL) if _IN_MAIN else None


def restore() -> None:
    """Make Ctrl-C a KeyboardInterrupt again, also where a shell has started the program in its background."""
    if _IN_MAIN:
        signal.signal(signal.SIGINT, signal.default_int_handler if _HANDLER is signal.SIG_IGN else _HANDLER)
