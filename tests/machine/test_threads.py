"""The environment of OpenMP: the number of threads and how they wait."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from solrl_lightning import build
from solrl_lightning.cli.launch import ranks_here
from solrl_lightning.machine import threads
from solrl_lightning.machine.memory import total_memory
from solrl_lightning.machine.threads import choose, configure, divide_threads, quota

SPIN = {"GOMP_SPINCOUNT": "10000"}


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),  # a container's own mount
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "100000 100000"}, 1),
        ("0::/elsewhere", {"cpu.max": "50000 100000"}, 0.5),  # the path is that of the host
        ("0::/a", {"b/cpu.max": "100000 100000"}, math.inf),  # another's
        ("5:memory:/\n3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "800000", "cpu/a/cpu.cfs_period_us": "200000"}, 4),
        ("1:cpu:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
    ],
)
def test_quota_is_the_least_of_the_groups(tmp_path: Path, groups: str, files: dict[str, str], cores: float) -> None:
    written(tmp_path, {"cgroup": groups})
    assert quota(tmp_path / "cgroup", written(tmp_path / "fs", files)) == cores
    assert quota(tmp_path / "none", tmp_path) == math.inf


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/", {"memory.max": "max"}, math.inf),
        ("0::/job/step", {"job/memory.max": "4096", "job/step/memory.max": "max"}, 4096),
        ("9:cpu:/x\n4:memory:/job", {"memory/job/memory.limit_in_bytes": "8192"}, 8192),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, math.inf),
    ],
)
def test_memory_is_the_least_of_the_groups(tmp_path: Path, groups: str, files: dict[str, str], limit: float) -> None:
    written(tmp_path, {"cgroup": groups})
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = total_memory(torch.device("cpu"), tmp_path / "cgroup", written(tmp_path / "fs", files))
    assert memory == min(limit, physical)


@pytest.mark.parametrize(
    ("environment", "machine", "variables"),
    [
        # cores, usable, limit, ranks, free
        ({}, (2, 2, math.inf, 1, 2), SPIN),
        ({}, (2, 2, math.inf, 1, 1.6), SPIN),
        ({}, (2, 2, math.inf, 1, 1.4), {"OMP_NUM_THREADS": "1"}),  # one thread waits for none
        ({}, (8, 8, math.inf, 1, 5.9), {"OMP_NUM_THREADS": "5"} | SPIN),
        ({}, (8, 8, math.inf, 1, 6), SPIN),
        ({}, (8, 8, 2.5, 1, 8), {"OMP_NUM_THREADS": "3"} | SPIN),
        ({}, (8, 8, 3, 1, 2), {"OMP_NUM_THREADS": "2"} | SPIN),
        ({}, (8, 8, math.inf, 4, 8), {"OMP_NUM_THREADS": "2"} | SPIN),
        ({}, (8, 8, math.inf, 4, 5), {"OMP_NUM_THREADS": "2"} | SPIN),  # the other three ranks use a core each
        ({}, (8, 8, 6, 4, 8), {"OMP_NUM_THREADS": "1"}),
        ({}, (2, 2, math.inf, 4, 2), {"OMP_NUM_THREADS": "1"}),
        ({"OMP_NUM_THREADS": "6"}, (8, 8, 2, 4, 1), SPIN),
        ({"OMP_NUM_THREADS": "1"}, (8, 8, 2, 1, 0), {}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, (2, 2, math.inf, 1, 2), {}),
        ({"GOMP_SPINCOUNT": "9"}, (8, 8, 2, 1, 8), {"OMP_NUM_THREADS": "2"}),
        ({"KMP_BLOCKTIME": "0"}, (2, 2, math.inf, 1, 2), {}),
    ],
)
def test_settings_of_a_machine(environment: dict[str, str], machine: Any, variables: dict[str, str]) -> None:
    assert choose(environment, *machine)[0] == variables


@pytest.mark.parametrize(
    ("environment", "machine", "report"),
    [
        ({}, (2, 2, math.inf, 1, 2), ""),
        ({}, (64, 64, 2.5, 1, 64), "threads: 3, of this machine's 64 cores (a quota of 2.5)"),
        ({}, (64, 8, 16, 1, 8), "threads: 8, of this machine's 64 cores (those where this process may run)"),
        ({}, (2, 2, math.inf, 1, 1), "threads: 1, of this machine's 2 cores (other processes use the rest"),
    ],
)
def test_fewer_threads_than_cores_are_reported_with_the_reason(
    environment: dict[str, str], machine: Any, report: str
) -> None:
    lines = choose(environment, *machine)[1]
    assert len(lines) == bool(report) and "".join(lines).startswith(report)


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_CPUS_ON_NODE": "1"}, 2),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_TASKS_PER_NODE": "8"}, 3),
        ({"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4", "SLURM_CPUS_ON_NODE": "9999"}, 1),  # bound to their own
        ({"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4", "SLURM_JOB_NAME": "bash"}, 1),
    ],
)
def test_ranks_that_share_the_cores(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ranks: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: len(os.sched_getaffinity(0)))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks_here() == ranks


def test_lightnings_ranks_divide_what_was_set(monkeypatch: pytest.MonkeyPatch, compose: Callable[..., Any]) -> None:
    for name in ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)  # Lightning leaves them in a process that has trained on several ranks
    before = torch.get_num_threads()
    options = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")
    try:
        divide_threads(2)
        assert torch.get_num_threads() == before and "SOLRL_LIGHTNING_THREADS" not in os.environ
        monkeypatch.setenv("SOLRL_LIGHTNING_THREADS", "OMP_NUM_THREADS=5 GOMP_SPINCOUNT=10000")
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        build.instantiate_trainer(compose(*options).trainer)
        assert torch.get_num_threads() == 2 and os.environ["OMP_NUM_THREADS"] == "2"
        build.instantiate_trainer(compose("trainer=cpu").trainer)  # the next job of a sweep
        assert torch.get_num_threads() == 5 and os.environ["OMP_NUM_THREADS"] == "5"
        monkeypatch.setattr(rank_zero_only, "rank", 0)  # Lightning sets it for the process
        monkeypatch.setenv("LOCAL_RANK", "1")  # a rank that has its share
        monkeypatch.setenv("WORLD_SIZE", "2")
        build.instantiate_trainer(compose(*options).trainer)
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


def test_nothing_is_set_after_torch_has_been_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "quota", lambda: 1.0)
    before = dict(os.environ)
    assert configure(64) == [] and dict(os.environ) == before


def test_idle_seconds_are_those_of_the_cores_where_the_process_may_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9999 9 0\ncpu0 1 1 1 100 20 0\ncpu1 1 1 1 300 40 0\ncpu10 1 1 1 5000 0 0\nintr 1 2\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1})
    assert threads._clock(stat).idle == pytest.approx(340 / os.sysconf("SC_CLK_TCK"))
    assert threads._clock(tmp_path / "none").idle == 0


# Real processes: what PyTorch makes of it

LOOK = """
import os, sys
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: int(sys.argv[1])]))
from solrl_lightning.machine import threads
threads.quota = lambda: float(sys.argv[2])
threads._free = lambda: float(sys.argv[3])
threads.configure()
print(os.environ.get("OMP_NUM_THREADS"), os.environ.get("GOMP_SPINCOUNT"))
if sys.argv[4:]:
    import torch
    print(torch.get_num_threads())
"""
CORES = len(os.sched_getaffinity(0))


def plain() -> dict[str, str]:
    names = ("OMP_", "MKL_", "GOMP_", "KMP_", "SOLRL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(names)}


def looked(*arguments: float | str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", LOOK, *map(str, arguments)]
    done = subprocess.run(command, env=plain() | environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_torch_has_the_threads_that_were_chosen() -> None:
    assert looked(CORES, 1, CORES, "torch") == ["1" if CORES > 1 else "None", "None", "1"]  # a quota
    assert looked(1, math.inf, 1, "torch") == ["None", "None", "1"]  # an affinity


def test_variables_of_the_user_stay_and_those_of_the_starting_process_are_chosen_again() -> None:
    user = {"OMP_NUM_THREADS": "9", "GOMP_SPINCOUNT": "7"}
    assert looked(CORES, 1, CORES, **user) == ["9", "7"]
    chosen = {"SOLRL_LIGHTNING_THREADS": "OMP_NUM_THREADS=9 GOMP_SPINCOUNT=7"}
    spins = "10000" if CORES > 1 else "None"
    assert looked(CORES, math.inf, CORES, **user, **chosen) == ["None", spins]
    divided = user | {"OMP_NUM_THREADS": "4"}  # by ``divide_threads``, for this rank
    assert looked(CORES, math.inf, 9, **divided, **chosen) == ["4", "10000"]


AT_THE_IMPORT_OF_TORCH = """
import os, runpy, sys

class Show:
    def find_spec(self, name, *others):
        if name == "torch":
            print(os.environ.get("OMP_NUM_THREADS"))
            os._exit(0)

sys.meta_path.insert(0, Show())
sys.stdout.reconfigure(line_buffering=True)
runpy.run_module("solrl_lightning", run_name="__main__")
"""


def test_the_command_chooses_before_torch_is_loaded(tmp_path: Path) -> None:
    # Another process's choice is made again; the number depends on the machine's load.
    chosen = {"OMP_NUM_THREADS": "7777", "SOLRL_LIGHTNING_THREADS": "OMP_NUM_THREADS=7777"}
    command = [sys.executable, "-c", AT_THE_IMPORT_OF_TORCH]
    done = subprocess.run(command, cwd=tmp_path, env=plain() | chosen, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()[-1:]
    assert line == "None" or 1 <= int(line) <= CORES
