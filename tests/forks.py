"""Runs the command line in forks of a process that has imported everything, so that a run can be killed cheaply.

python tests/forks.py reads one JSON line per run, the arguments of `Forks.ranks`, and answers with one, a list of
{"status", "seconds", "output"}; the status of a killed run is minus the signal. It has one thread, as forks need.
"""

import gc
import importlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from reward_servers import free_port

_IMPORTED = (  # what a run imports on its way
    "solrl_lightning.tasks.train",
    "solrl_lightning.policies.flux1",
    "solrl_lightning.callbacks.summary",
    "solrl_lightning.callbacks.sample_grid",
    "solrl_lightning.rewards.shapes",
    "torch.utils.tensorboard",
)


class Ended(NamedTuple):
    """How a run ended."""

    status: int
    seconds: float
    output: str


class Forks:
    """A context manager: the process that forks the runs."""

    def __enter__(self) -> "Forks":
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[1] / "dev")])
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, __file__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdin is not None and process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout
        self._wait: Callable[[], object] = process.wait
        return self

    def __exit__(self, *error: object) -> None:
        self._requests.close()
        self._answers.close()
        self._wait()

    def run(
        self,
        folder: Path,
        *arguments: str,
        target: str = "solrl_lightning.__main__:main",
        kill_at: str | None = None,
        file_limit: int | None = None,
    ) -> Ended:
        """Runs the command line in ``folder``.

        Args:
            target: [folder of the tests/]module:function that takes the arguments and returns the status.
            kill_at: a path in ``folder``; SIGKILL once it exists.
            file_limit: bytes; the kernel kills the run while it writes a longer file.
        """
        faults = dict(kill_at=kill_at, file_limit=file_limit)
        (ended,) = self.ranks(folder, [{}], *arguments, target=target, **faults)
        return ended

    def ranks(
        self,
        folder: Path,
        environments: list[dict[str, str]],
        *arguments: str,
        target: str = "solrl_lightning.__main__:main",
        **faults: Any,
    ) -> list[Ended]:
        """Runs the command line in ``folder`` once with each environment, all at the same time."""
        request = dict(folder=str(folder), environments=environments, arguments=arguments, target=target, **faults)
        print(json.dumps(request), file=self._requests, flush=True)
        return [Ended(**each) for each in json.loads(self._answers.readline())]


class ForksOfThisProcess(Forks):
    """Forks of this process as it is on entry, with one thread; a fork of it has imported what this one has."""

    def __enter__(self) -> "Forks":
        (requests, to_it), (from_it, answers) = os.pipe(), os.pipe()
        process = os.fork()
        if process == 0:
            os.close(to_it)
            _serve(os.fdopen(requests), os.fdopen(answers, "w"))
        os.close(requests)
        os.close(answers)
        self._requests, self._answers = os.fdopen(to_it, "w"), os.fdopen(from_it)
        self._wait = partial(os.waitpid, process, 0)
        return self


def two_ranks() -> list[dict[str, str]]:
    """Return the environments of a torchrun of two processes."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    return [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def _serve(requests: IO[str], answers: IO[str]) -> NoReturn:
    for line in requests:
        print(json.dumps([ended._asdict() for ended in _forked(json.loads(line))]), file=answers, flush=True)
    os._exit(0)  # to take the libraries down takes two seconds


def _run(request: dict[str, Any], environment: dict[str, str]) -> None:
    """In the fork; does not return."""
    status = 1
    try:
        os.chdir(request["folder"])
        os.environ.update(environment)
        if request.get("file_limit") is not None:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"],) * 2)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        sys.argv = ["solrl_lightning", *request["arguments"]]
        sys.modules["__main__"].__spec__ = importlib.util.find_spec("solrl_lightning.__main__")  # as python -m has it
        path, _, function = request["target"].partition(":")
        folder, _, module = path.rpartition("/")
        sys.path.insert(0, str(Path(__file__).parent / folder))
        status = getattr(importlib.import_module(module), function)(request["arguments"])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def torchrun(arguments: list[str]) -> int:
    """A target: what torchrun does with PET_NNODES etc. in the environment, with forks as its ranks."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    config, *_ = config_from_args(parse_args(["program"]))
    config.start_method = "fork"
    return max(elastic_launch(config, _rank)(arguments).values())


def _rank(arguments: list[str]) -> int:
    from solrl_lightning.__main__ import main

    status = main(arguments)
    if status != 0:  # a function that has returned waits for the other ranks, half a minute
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _forked(request: dict[str, Any]) -> list[Ended]:
    with ExitStack() as stack:
        started, runs = time.monotonic(), []
        for environment in request["environments"]:
            output = stack.enter_context(tempfile.TemporaryFile())
            process = os.fork()
            if process == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                _run(request, environment)
            runs.append((process, output))
        if request.get("kill_at") is not None:
            ((process, _),) = runs
            while (
                not Path(request["folder"], request["kill_at"]).exists()
                and os.waitid(os.P_PID, process, _ENDED) is None
            ):
                time.sleep(0.005)
            os.kill(process, signal.SIGKILL)  # no harm to one that has ended: it is not waited for yet
        return [_waited_for(process, output, started) for process, output in runs]


_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


def _waited_for(process: int, output: IO[bytes], started: float) -> Ended:
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    seconds = time.monotonic() - started
    output.seek(0)
    return Ended(status, seconds, output.read().decode(errors="replace"))


if __name__ == "__main__":
    import once
    import pytest
    from tqdm import tqdm

    from solrl_lightning.__main__ import main
    from solrl_lightning.cli import launch

    gc.set_threshold(*once.RARELY)
    for name in _IMPORTED:
        importlib.import_module(name)
    patch = pytest.MonkeyPatch()
    once.compose_once(patch)
    once.draw_once(patch)
    once.try_out_once(patch)
    tqdm.monitor_interval = 0  # it would start a thread
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        main(f"experiment=smoke trainer=cpu iterations=1 hydra.run.dir={folder}/run ~logger".split())
    gc.collect()
    gc.freeze()
    launch.renew_store.cache_clear()  # which knows the launcher of a process
    _serve(sys.stdin, sys.stdout)
