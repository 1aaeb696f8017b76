"""Servers for reward=http: the examples of docs/rewards/http.md as processes, and handlers in a thread."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

PAGE = Path(__file__).parents[1] / "docs" / "rewards" / "http.md"
EXAMPLES = dict(re.findall(r"^`(\S+\.py)`:\n\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S))


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start(name: str, port: int, environment: Mapping[str, str] | None = None) -> subprocess.Popen:
    """Start an example of the page and return its process when it accepts connections."""
    process = subprocess.Popen(
        [sys.executable, "-IS", "-c", EXAMPLES[name], str(port)], env=environment, stderr=subprocess.DEVNULL
    )
    while process.poll() is None:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return process
        time.sleep(0.005)
    raise AssertionError(f"{name} ended with {process.returncode}")


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


@contextmanager
def started(name: str, port: int, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of an example of the page, which is killed on exit."""
    process = start(name, port, environment)
    try:
        yield f"http://127.0.0.1:{port}/score"
    finally:
        kill(process)


@contextmanager
def in_thread(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a handler that answers in threads of this process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
