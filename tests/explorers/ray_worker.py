"""Workers of Ray as forks of a process that has imported torch and what builds a model: a core's ten seconds less each.

Ray runs this file in place of its own; it waits for a fork that runs Ray's.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESS = "SOLRL_TEST_WORKERS"
"""Environment variable with the name of an abstract socket, at which the forking process listens."""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork workers from this process as it is on entry: with one thread, without Ray (its import reads variables)."""
    import signal

    assert "ray" not in sys.modules
    os.environ[ADDRESS] = f"solrl-workers-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{os.environ[ADDRESS]}")
        listener.listen()
        process = os.fork()
        if process == 0:
            _serve(listener)
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _serve(listener: socket.socket) -> None:
    import ctypes
    import functools
    import runpy
    import signal
    from importlib.util import find_spec
    from pathlib import Path

    package = find_spec("ray")
    assert package is not None and package.origin is not None
    file = str(Path(package.origin).parent / "_private/workers/default_worker.py")
    end_with_parent = functools.partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile() as lines:
            arguments, environment = json.loads(lines.readline())
            if os.fork() == 0:
                end_with_parent()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                os.environ.clear()
                os.environ.update(environment)
                sys.argv = [file, *arguments]
                runpy.run_path(file, run_name="__main__")
                os._exit(0)


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{os.environ[ADDRESS]}")
        connection.sendall(f"{json.dumps((sys.argv[1:], dict(os.environ)))}\n".encode())
        connection.recv(1)  # nothing, as soon as the fork has ended
