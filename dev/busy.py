"""Times a command on a quiet machine, beside busy processes and under a quota: python dev/busy.py [OVERRIDE...]

Every condition runs with libgomp's defaults (GOMP_SPINCOUNT=300000, a thread for each core) and with what the command
sets by itself, alternating. The quota is that of a control group (version 1 or 2), which takes root.

    python dev/busy.py                                   # experiment=smoke iterations=3
    python dev/busy.py --only set --loops 0 4 --quota 1 -- iterations=12    # the default run
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

PERIOD = 100_000  # microseconds
DEFAULTS = {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}  # as with nothing set
OURS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "SOLRL_LIGHTNING_THREADS")


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        time.sleep(1)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def quota(cores: float | None) -> Iterator[Path | None]:
    """Return the file that puts a process into a control group with this quota; None without a quota."""
    if cores is None:
        yield None
        return
    groups = Path("/sys/fs/cgroup")
    second = (groups / "cpu.max").exists() or (groups / "cgroup.controllers").exists()
    group = (groups if second else groups / "cpu") / f"busy-{os.getpid()}"
    group.mkdir()
    try:
        if second:
            (group / "cpu.max").write_text(f"{int(cores * PERIOD)} {PERIOD}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(int(cores * PERIOD)))
        yield group / "cgroup.procs"
    finally:
        time.sleep(0.5)  # its processes have ended
        group.rmdir()


def timed(overrides: list[str], variables: dict[str, str], procs: Path | None) -> tuple[float, float]:
    """Seconds of the command, and of its task."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS} | variables
    folder = Path(tempfile.mkdtemp())
    enter = None if procs is None else lambda: procs.write_text(str(os.getpid()))
    command = [sys.executable, "-m", "solrl_lightning", *overrides, f"hydra.run.dir={folder / 'run'}"]
    started = time.perf_counter()
    try:
        subprocess.run(command, env=environment, preexec_fn=enter, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        return seconds, json.loads((folder / "run" / "summary.json").read_text())["seconds_total"]
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--loops", type=int, nargs="*", default=[0, 2, 4])
    parser.add_argument("--quota", type=float, nargs="*", default=[1], help="cores")
    parser.add_argument("--only", choices=["defaults", "set"], help="one of the two environments")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    overrides = options.overrides or ["experiment=smoke", "iterations=3"]
    conditions = [(f"{loops} busy loops", loops, None) for loops in options.loops]
    conditions += [(f"quota of {cores:g}", 0, cores) for cores in options.quota]
    quiet: dict[str, float] = {}
    print(f"{'':16}{'environment':12}{'command':>10}{'task':>10}{'x quiet':>10}", flush=True)
    for name, loops, cores in conditions:
        times: dict[str, list[tuple[float, float]]] = {}
        with busy(loops), quota(cores) as procs:
            for turn in range(options.rounds):
                environments = {"defaults": DEFAULTS, "set": dict[str, str]()}
                for each in list(environments)[:: 1 if turn % 2 == 0 else -1]:
                    if options.only in (None, each):
                        times.setdefault(each, []).append(timed(overrides, environments[each], procs))
        for each, runs in sorted(times.items()):
            command, task = (median(column) for column in zip(*runs, strict=True))
            quiet.setdefault(each, command)
            print(f"{name:16}{each:12}{command:9.1f}s{task:9.1f}s{command / quiet[each]:10.2f}", flush=True)


if __name__ == "__main__":
    main()
