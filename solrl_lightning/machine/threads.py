"""The environment of OpenMP for this machine. libgomp reads it once, when torch is loaded.

PyTorch takes a thread for every core that the process may run on, also where a container's quota gives it the time of
fewer and where other processes use the cores. While threads wait for each other they spin, in libgomp up to 300,000
times. On free cores 10,000 are as fast; on busy ones a thread spins in the time slice of the one that it waits for.
docs/benchmark.md has the measurements.
"""

import math
import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

from solrl_lightning.machine.control_groups import GROUPS, MOUNTS, limits

_CPU_FILES = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
_CHOSEN = "SOLRL_LIGHTNING_THREADS"  # what this package has set; a process that it starts inherits it
_NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
_SHORTEST = 0.25  # seconds; the system counts in hundredths
_FREE = 0.75  # of the threads' cores; with fewer, a thread for each free core is faster
_SPINS = 10_000


class _Clock(NamedTuple):
    seconds: float
    used: float  # CPU seconds of this process
    idle: float  # CPU seconds that nobody used of the cores where this process may run


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count() or 1))


def _clock(file: Path = Path("/proc/stat")) -> _Clock:
    cores, idle = {f"cpu{core}" for core in _cores()}, 0
    for line in file.read_text().splitlines() if file.is_file() else []:
        name, *ticks = line.split()
        idle += int(ticks[3]) + int(ticks[4]) if name in cores else 0  # idle, and idle until a disk answers
    return _Clock(time.monotonic(), time.process_time(), idle / os.sysconf("SC_CLK_TCK") if idle else 0)


_STARTED = _clock()  # when the program began: ``__main__`` imports this file first


def quota(groups: Path = GROUPS, mounts: Path = MOUNTS) -> float:
    """Return the number of cores that the control groups give; infinite if unlimited.

    (``loky.cpu_count`` reads the root only.)
    """
    pairs = [text.split() for text in limits("cpu", ("cpu.max",), _CPU_FILES, groups, mounts)]
    return min((int(most) / int(period) for most, period in pairs if most not in ("max", "-1")), default=math.inf)


def choose(
    environment: MutableMapping[str, str], cores: int, usable: int, limit: float, ranks: int, free: float
) -> tuple[dict[str, str], list[str]]:
    """Return what to set in ``environment``, and a line for each restriction that the user should know of.

    Args:
        cores, usable: of the machine, and where this process may run.
        limit: by ``quota``.
        ranks: which share these cores and this quota; each uses a core while it starts.
        free: cores that this process could have had since it began.
    """
    variables, lines = dict[str, str](), list[str]()
    allowed = max(1, math.ceil(min(usable, limit)) // ranks)
    share = (free + ranks - 1) / ranks
    threads = allowed if share >= _FREE * allowed else max(1, int(share))
    if any(name in environment for name in _NUMBER):
        first = environment.get("OMP_NUM_THREADS", "").split(",")[0]  # a list has a number for each level of nesting
        threads = int(first) if first.isdigit() else allowed
    else:
        if threads < usable:
            variables["OMP_NUM_THREADS"] = str(threads)
        cause = f"a quota of {limit:g}" if limit < usable else "those where this process may run"
        if threads < allowed:
            cause = "other processes use the rest; set OMP_NUM_THREADS for another number"
        if threads < allowed or min(usable, limit) < cores:
            lines.append(f"threads: {threads}, of this machine's {cores} cores ({cause})")
    if threads > 1 and not any(name in environment for name in _WAITING):
        variables["GOMP_SPINCOUNT"] = str(_SPINS)
    return variables, lines


def configure(ranks: int = 1) -> list[str]:
    """Set in this process's environment what the user has not set, and return the lines of ``choose``.

    Does nothing where torch, and libgomp with it, has been loaded.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return []
    for name, value in _chosen().items():  # by the process that started this one, perhaps on another machine
        if os.environ.get(name) == value:
            del os.environ[name]
    time.sleep(max(0, _STARTED.seconds + _SHORTEST - time.monotonic()))
    usable = len(_cores())
    variables, lines = choose(os.environ, os.cpu_count() or usable, usable, quota(), ranks, _free())
    os.environ |= variables
    os.environ[_CHOSEN] = " ".join(f"{name}={value}" for name, value in variables.items())
    return lines


def divide_threads(ranks: int) -> None:
    """Divide the threads that ``configure`` has set among the ranks that Lightning starts here, which inherit them.

    Lightning does so with the machine's threads.
    """
    total = _chosen().get("OMP_NUM_THREADS")
    if total is not None:
        import torch

        threads = max(1, int(total) // ranks)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _chosen() -> dict[str, str]:
    return dict(pair.split("=") for pair in os.environ.get(_CHOSEN, "").split())


def _free() -> float:
    now = _clock()
    if now.idle == 0:  # not counted here
        return math.inf
    return (now.used - _STARTED.used + now.idle - _STARTED.idle) / (now.seconds - _STARTED.seconds)
