"""A target of forks.py: explorers in processes of their own, which are killed and started again, and their run."""

import os
import signal
import socket
import time
from contextlib import suppress

from reward_servers import free_port

from solrl_lightning.__main__ import main


def run(arguments: list[str]) -> int:
    """Run the command line ``arguments[2:]`` with ``arguments[0]`` explorers.

    If ``arguments[1]`` is not 0, one after another is killed, that many seconds after the one before answers again.
    """
    count, pause, *options = arguments
    ports = [free_port() for _ in range(int(count))]
    keeper = os.fork()
    if keeper == 0:
        os.setsid()
        _keep(ports, float(pause), options)
    try:
        for port in ports:
            _wait_for(port)
        urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        return main([*options, f"explorers.urls=[{urls}]"])
    finally:
        os.killpg(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


def _keep(ports: list[int], pause: float, options: list[str]) -> None:
    """Keep explorers running until this process group is killed."""
    explorers = {port: _start(port, options) for port in ports}
    if pause:
        for port in ports:
            _wait_for(port)
    while pause:
        for port, process in explorers.items():
            time.sleep(pause)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            explorers[port] = _start(port, options)
            _wait_for(port)
    signal.pause()


def _start(port: int, options: list[str]) -> int:
    process = os.fork()
    if process == 0:
        folder = f"explorer-{port}-{time.monotonic_ns()}"
        os._exit(main(["task=explore", *options, f"task.port={port}", f"hydra.run.dir={folder}"]))
    return process


def _wait_for(port: int) -> None:
    while True:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)
