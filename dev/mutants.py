"""Run mutation tests on the core of the method: ``python dev/mutants.py [NAME ...]``.

Each mutant replaces one fragment of a file in a temporary copy of the tree and runs the tests named beside it. A mutant
survives if they pass. The files in ``dev/mutants`` hold the mutants: for each file and name the fragment, what replaces
it, and the tests.

Tests run in forks of this process, which imports the libraries but not the package, so most mutants take seconds.
Exit status 1: a mutant survived or exceeded the time limit, a fragment does not occur exactly once, or the tests fail
without any mutant.
"""

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = (
    "_pytest.assertion.rewrite diffusers.loaders diffusers.pipelines.flux.pipeline_flux hydra lightning.pytorch "
    "matplotlib.pyplot peft scipy.stats tensorboard.backend.event_processing.event_accumulator torch._dynamo "
    "torchmetrics transformers.models.t5 datasets open_clip torch._inductor.compile_fx"
).split()


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_mutants() -> list[Mutant]:
    """Read the mutants of ``dev/mutants``."""
    return [
        Mutant(name, file, edit["old"], edit["new"], (edit["test"],))
        for path in sorted(Path(__file__).with_suffix("").glob("*.yaml"))
        for file, edits in yaml.safe_load(path.read_text(encoding="utf-8")).items()
        for name, edit in edits.items()
    ]


def stale(mutants: list[Mutant]) -> list[Mutant]:
    """Return the mutants whose fragment does not occur exactly once in their file."""
    return [m for m in mutants if (ROOT / m.file).read_text(encoding="utf-8").count(m.old) != 1]


class Outcome(NamedTuple):
    status: int | None  # of pytest; negative after a signal, None after the time limit
    seconds: float
    log: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names or files of mutants; default: all mutants")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one mutant")
    options = parser.parse_args()
    mutants = read_mutants()
    if options.names:
        mutants = [m for m in mutants if any(part in m.name or part in m.file for part in options.names)]
    if not mutants:
        parser.error(f"no mutant is named {' or '.join(options.names)}")
    for mutant in stale(mutants):
        print(f"stale      {mutant.name}: {mutant.file} does not have {mutant.old!r} exactly once")
    if stale(mutants):
        return 1
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    for library in LIBRARIES:
        importlib.import_module(library)
    targets = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
    unchanged = Mutant("no mutant", mutants[0].file, "", "", targets)
    ((_, sound),) = run([unchanged], jobs=1, limit=options.limit * len(targets))
    if sound.status != 0:
        print(f"{sound.log}\nthe tests fail without a mutant")
        return 1
    print(f"the tests pass without a mutant in {sound.seconds:.0f} s", flush=True)
    began, killed = time.monotonic(), 0
    for mutant, outcome in run(mutants, options.jobs, options.limit):
        verdict = {0: "SURVIVED", 1: "killed"}.get(outcome.status, "UNDECIDED")
        killed += verdict == "killed"
        print(f"{verdict:10} {outcome.seconds:4.0f} s  {mutant.file}: {mutant.name}", flush=True)
        if verdict == "UNDECIDED":
            print(outcome.log)
    print(f"{killed} of {len(mutants)} mutants killed in {time.monotonic() - began:.0f} s")
    return 0 if killed == len(mutants) else 1


def run(mutants: list[Mutant], jobs: int, limit: float) -> Iterator[tuple[Mutant, Outcome]]:
    """Yield every mutant when its tests end; runs ``jobs`` mutants at once."""
    waiting = mutants[::-1]
    running: dict[int, tuple[Mutant, Path, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant, tree = waiting.pop(), Path(folder) / str(len(waiting))
                plant(mutant, tree)
                running[start(tree, mutant.tests)] = (mutant, tree, time.monotonic())
            time.sleep(0.05)
            for process, (mutant, tree, began) in list(running.items()):
                seconds = time.monotonic() - began
                ended, status = os.waitpid(process, os.WNOHANG)
                if not ended and seconds < limit:
                    continue
                if not ended:
                    os.killpg(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                log = "\n".join((tree / "log").read_text(encoding="utf-8").splitlines()[-40:])
                yield mutant, Outcome(os.waitstatus_to_exitcode(status) if ended else None, seconds, log)
                del running[process]
                shutil.rmtree(tree)


def plant(mutant: Mutant, tree: Path) -> None:
    """Copy the repository to ``tree`` with the mutant, in the layout of the installed package."""
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("solrl_lightning", "tests", "dev", "docs"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for folder in ("callbacks", "conf"):
        shutil.copytree(ROOT / folder, tree / "solrl_lightning" / folder, ignore=ignored)
        (tree / folder).symlink_to(tree / "solrl_lightning" / folder)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tree)
    file = tree / mutant.file
    file.write_text(file.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")


def start(tree: Path, tests: tuple[str, ...]) -> int:
    """Fork a process that runs the tests in ``tree`` and return its id; it leads a process group and logs to a file."""
    process = os.fork()
    if process:
        return process
    status = 3  # pytest's for internal errors
    try:
        os.setsid()
        log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        sys.path.insert(0, str(tree))  # ahead of an editable install
        os.environ["PYTHONPATH"] = str(tree)
        imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # before pytest could rewrite their assertions
        plain = ["-o", "addopts=", "-p", "no:cacheprovider", "-x", "-q", "--tb=line"]
        status = int(pytest.main([*plain, *imported, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
