"""Which process of a run this is, and a name for the run's folder that all of them find.

Read from the environment, in the order of Lightning: torchrun, srun, others, its own launcher. Imports nothing heavy.
"""

import ctypes
import os
import re
import signal
import socket
import sys
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from solrl_lightning.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

_OTHERS = ("OMPI_COMM_WORLD", "PMI", "JSM_NAMESPACE")  # mpirun of Open MPI, of MPICH and Intel MPI; jsrun
_OF_LIGHTNING = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # read while it is imported
_INTERACTIVE = ("bash", "interactive")  # names of jobs in which Lightning ignores SLURM
_AFTER_LIGHTNING = {"NODE_RANK", "LOCAL_RANK", "MASTER_PORT"}  # what it leaves in a process whose ranks it has started
_HERE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")  # of torchrun, Open MPI, MPICH

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Launcher(NamedTuple):
    """What has started the processes of a run, and its variables."""

    name: str
    size: str
    """Number of processes."""
    ranks: tuple[str, ...]
    """All are 0 in the first process."""
    advice: str


def end_together() -> None:
    """Wait for the other ranks, and leave their group.

    torchrun kills all if one fails, and a thread of the group that outlives it can abort its process at the end.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


def _launcher() -> _Launcher:
    if _torchrun():  # which numbers nodes itself, whatever srun calls them
        return _Launcher("torchrun", "WORLD_SIZE", ("RANK",), "")
    if _srun():
        advice = (
            " Each task must see all GPUs of its node (no --gpus-per-task). For one process in an allocation, as in a "
            "notebook, set SLURM_JOB_NAME=interactive SLURM_STEP_NUM_TASKS=1."
        )
        return _Launcher("srun", "SLURM_NTASKS", ("SLURM_PROCID",), advice)
    for name in _OTHERS:
        if _number(f"{name}_SIZE", 1) > 1:
            advice = " Lightning finds the ranks of mpirun by the package mpi4py: run pip install mpi4py."
            return _Launcher("mpirun or jsrun", f"{name}_SIZE", (f"{name}_RANK",), advice)
    advice = " Start ranks by torchrun or srun, or unset these variables: Lightning then starts its own ranks."
    return _Launcher("", "WORLD_SIZE", ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK"), advice)


def _number(name: str, default: int = 0) -> int:
    """Return the number in a variable of a launcher. Raises ``UserError`` for another text."""
    value = os.environ.get(name, str(default))
    if not re.fullmatch(r"\d+", value):
        raise UserError(f"{name}={value} is invalid: a launcher sets it to a whole number. Unset it, or set it so.")
    return int(value)


def is_first() -> bool:
    """Return whether this process starts the run: rank 0, the only one that checks and writes its folder."""
    return not any(map(_number, _launcher().ranks))


def end_with_first() -> None:
    """Let Linux kill a rank that Lightning has started as soon as the first one's process ends.

    Otherwise it would wait for a first rank that has ended before they meet, and, on GPUs, for NCCL's timeout.
    """
    if sys.platform == "linux" and not _launcher().name and _number("LOCAL_RANK"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def advice() -> str:
    """Return what to do where the trainer does not run with what has started this process; empty without a launcher."""
    launcher = _launcher()
    return launcher.advice if launcher.name else ""


def check_alone() -> None:
    """Raise ``UserError`` if a launcher has started several processes: each would do the same task."""
    launcher = _launcher()
    if launcher.name and not _in_batch() and (started := _number(launcher.size, 1)) > 1:
        raise UserError(
            f"{launcher.size}={started} is invalid here: {launcher.name} has started {started} processes, and this "
            f"task takes one. Start one.{launcher.advice}"
        )


def check_world(num_nodes: int, devices: int, rank: int, is_launched: bool) -> None:
    """Raise ``UserError`` unless the processes that were started are the ranks of a trainer, and this one is ``rank``.

    ``is_launched``: whether Lightning has found what started the processes; else its first rank would start others.
    """
    launcher, size = _launcher(), num_nodes * devices
    if _in_batch() and (tasks := _number("SLURM_NTASKS")) > 1:
        raise UserError(
            f"SLURM_NTASKS={tasks} is invalid here: this one process is sbatch's script, and srun has not started the "
            f"other tasks. Write srun before python in the script.{launcher.advice}"
        )
    variables = (launcher.size, *launcher.ranks)
    started, here = _number(launcher.size, 1), next((_number(name) for name in _HERE if name in os.environ), devices)
    if launcher.name == "srun":
        here = min(started, _number("SLURM_NTASKS_PER_NODE") or max(1, started // _number("SLURM_NNODES", 1)))
    fits = started == size and here == devices
    who, way_out = f"{launcher.name} has started {started} processes", launcher.advice
    fix = f" Set trainer.num_nodes={started // here} trainer.devices={here}."
    if not launcher.name:
        variables = tuple(dict.fromkeys([*variables, *_OF_LIGHTNING]))  # its loggers write nothing on another rank
        fits = started == size if "LOCAL_RANK" in os.environ else started == 1  # otherwise Lightning starts no ranks
        who, fix = "no launcher has started this process", ""
        if "WORLD_SIZE" not in os.environ and os.environ.keys() >= _AFTER_LIGHTNING:
            who = "an earlier command of this process had ranks, each of which runs the whole script"
            way_out = " Start each command in a new process: python -m solrl_lightning <options>."
    is_lost = bool(launcher.name) and started > 1 and fits and not is_launched
    if fits and not is_lost and not (rank == 0 and any(map(_number, variables[1:]))):
        if started < size and "MASTER_PORT" in os.environ:  # Lightning starts the other ranks
            _check_free(_number("MASTER_PORT"))
        return
    takes = "Lightning has not found them" if is_lost else f"the trainer takes {size}, this one for rank {rank}"
    environment = " ".join(f"{name}={os.environ[name]}" for name in variables if name in os.environ)
    raise UserError(f"{environment} is invalid here: {who}, and {takes}.{'' if fits else fix}{way_out}")


def _check_free(port: int) -> None:
    """Raise ``UserError`` if a program of this machine has the port: the other ranks would wait for this one there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            rule = f"the first rank listens there, which fails ({error})"
            raise UserError(f"MASTER_PORT={port} is invalid: {rule}. Unset it, or set a free port.") from error


def ranks_here() -> int:
    """Return the ranks that another program started on this machine and that share the cores of this process.

    SLURM gives a task its own cores, or none: then it sees all that the job has on this machine.
    """
    if _srun():
        on_node = _number("SLURM_CPUS_ON_NODE", os.cpu_count() or 1)
        bound = sys.platform == "linux" and len(os.sched_getaffinity(0)) < on_node
        tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "1")
        return 1 if bound else int(re.split(r"\D", tasks)[0] or 1)  # as 8(x2) or 8,4
    return next((_number(name) for name in _HERE if name in os.environ), 1)


@cache  # ``__main__.main`` clears it
def launched(pattern: str) -> str:
    """Format the time of this command by ``pattern``, equal in all ranks of torchrun; under srun the SLURM job's id."""
    if _torchrun():
        store = _store_of_torchrun()
        if is_first():
            store.set(pattern, datetime.now().strftime(pattern))
        return store.get(pattern).decode()
    if _srun() and _number("SLURM_NTASKS") > 1:
        step, restarts = os.environ.get("SLURM_STEP_ID", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
        return f"slurm-{os.environ['SLURM_JOB_ID']}.{step}" + (f"-restart{restarts}" if restarts != "0" else "")
    return datetime.now().strftime(pattern)


def check_launched(folders: str, num_nodes: object) -> None:
    """Raise UserError if a rank is no number, other nodes have nothing that starts their ranks, or no folder is shared.

    ``folders`` are names of folders, uninterpolated. Without a launcher, Lightning finds the other nodes by MASTER_ADDR
    and NODE_RANK.
    """
    for name in _OF_LIGHTNING:
        _number(name)
    job, tasks = os.environ.get("SLURM_JOB_NAME"), _number("SLURM_STEP_NUM_TASKS", 1)
    if job in _INTERACTIVE and tasks > 1 and not _torchrun():
        raise UserError(
            f"SLURM_JOB_NAME={job} is invalid here: srun has started {tasks} tasks, and Lightning takes each of them "
            "in a job of that name, as salloc gives, for a separate run. Start them by srun env SLURM_JOB_NAME=solrl "
            "python; for one process in a shell or notebook, set SLURM_STEP_NUM_TASKS=1."
        )
    launcher, nodes = _launcher().name, num_nodes if isinstance(num_nodes, int) else 1
    if not launcher and nodes > 1 and "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"trainer.num_nodes={num_nodes} is invalid here: no launcher has started this process, so it would wait "
            "for the other nodes. Start it by torchrun or srun on every node, or set trainer.num_nodes=1."
        )
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    agree = {"torchrun": has_store, "srun": True, "": nodes == 1}
    if "${launched:" in folders and not agree.get(launcher, False):
        raise UserError(
            f"With {launcher or 'several nodes and no launcher'} the ranks of a run agree on no folder. Name one for "
            "all with hydra.run.dir=<folder>, for a sweep hydra.sweep.dir=<folder>."
        )


def _torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _srun() -> bool:
    return _number("SLURM_NTASKS") > 0 and os.environ.get("SLURM_JOB_NAME") not in _INTERACTIVE


def _in_batch() -> bool:
    """Return whether this is the script of sbatch itself, one process whatever the number of tasks."""
    return _launcher().name == "srun" and "SLURM_STEP_ID" not in os.environ


_expired: list[object] = []  # stores of the jobs that have ended in this process


@cache  # `expire_store` clears it
def renew_store() -> object:
    """Make a new store for ranks that torchrun has started again, or that have run another job of a sweep.

    Return it in rank 0, which holds it, else None. PyTorch 2.15 reuses torchrun's store, which still has the addresses
    of the killed ranks, or of the other job: the first rank that starts reads them as the addresses of its peers, and
    fails to connect.
    """
    if not _torchrun() or (os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and not _expired):
        return None
    from torch.distributed import TCPStore

    of_restart, address, key = _store_of_torchrun(), os.environ["MASTER_ADDR"], f"port/{len(_expired)}"
    renewed = TCPStore(address, 0, is_master=True, multi_tenant=True) if is_first() else None
    if renewed is not None:
        of_restart.set(key, str(renewed.port))
    os.environ |= {"MASTER_PORT": of_restart.get(key).decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return renewed


def expire_store() -> None:
    """Let the next job have a new store; rank 0 keeps the old one for those that have not left it."""
    _expired.append(renew_store())
    renew_store.cache_clear()


@cache  # `renew_store` changes the address in the environment
def _store_of_torchrun() -> "Store":
    """Return the part that belongs to this start of the ranks."""
    from torch.distributed import PrefixStore, TCPStore  # here: only ranks of torchrun need it

    server = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore(f"solrl_lightning/{os.environ['TORCHELASTIC_RESTART_COUNT']}", server)
