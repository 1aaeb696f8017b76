"""Train on a machine that fails: ``python dev/faulty_machine.py [--iterations 60] [--seed 0] [OVERRIDES]``.

Trains the embedded model twice with the same options, its reward behind ``task=serve``: once in peace, and once with
these faults, the kills last and the others in random order. After each, the same command with ``ckpt=auto`` is given:

| fault | what happens |
|---|---|
| kill | SIGKILL after one to three minutes, as often as the run lasts |
| disk | the run's disk (a tmpfs) is filled up to less than a checkpoint and cleared when the command has ended; twice |
| prompts | the prompt file is a folder for one start |
| server | the reward server is killed and started again when the command has ended; twice |
| end | SIGKILL while the last files are written, after the last iteration |

Prints the message of each command that ended. Exit status 1: a message is not one line, a fault was not reached, or
the two runs differ in weights, optimiser, averages, records or exported files. Linux only; without root it runs in
namespaces of its own, to mount the tmpfs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from solrl_lightning.artifacts.run_folder import BEST, LAST
from solrl_lightning.data.sources import read_records

DISK = 256  # MiB
# Parts of names of values that may differ: times, paths, threads, and a count of evaluations that Lightning restarts.
DIFFERENT = "seconds /time/ StageTimings memory /paths/ dirpath best_model_path validate_loop /threads".split()


def serve(port: int) -> subprocess.Popen:
    """Start a server of the shapes reward and wait until it answers."""
    command = [sys.executable, "-m", "solrl_lightning", "task=serve", "reward=shapes", f"task.port={port}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if "/score" in line:
            return server
    raise SystemExit("the reward server did not start")


class Machine:
    """What the faults act on: a small disk, a prompt file and a reward server."""

    def __init__(self, folder: Path, port: int) -> None:
        self.disk, self.prompts, self.port = folder / "disk", folder / "prompts.txt", port
        self.prompts.write_text("\n".join(record.text for record in read_records("shapes-train", "prompt")) + "\n")
        self.server = serve(port)

    def fill_disk(self, remainder: int) -> None:
        """Leave ``remainder`` bytes of the disk."""
        ballast = self.disk / "ballast"
        with open(ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(self.disk).free - remainder))

    def stop_server(self) -> None:
        self.server.kill()
        self.server.wait()

    def repair(self) -> None:
        """Undo every fault."""
        (self.disk / "ballast").unlink(missing_ok=True)
        if self.prompts.is_dir():
            self.prompts.rmdir()
            self.prompts.with_suffix(".away").rename(self.prompts)
        if self.server.poll() is not None:
            self.server = serve(self.port)

    def hide_prompts(self) -> None:
        self.prompts.rename(self.prompts.with_suffix(".away"))
        self.prompts.mkdir()


@contextmanager
def mounted(disk: Path) -> Iterator[None]:
    """Mount a tmpfs of ``DISK`` MiB."""
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def start(command: list[str], log: Path) -> subprocess.Popen:
    with open(log, "wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def wait(process: subprocess.Popen, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    """Wait until the process ends, ``until`` is true or ``seconds`` have passed."""
    end = time.monotonic() + seconds
    while process.poll() is None and not until() and time.monotonic() < end:
        time.sleep(0.01)


def written(folder: Path) -> int:
    """Return when a folder was written last; a run that ends, or ends with an error, writes ``lora/``."""
    return folder.stat().st_mtime_ns if folder.exists() else 0


def faulty(command: list[str], run: Path, machine: Machine, chance: random.Random) -> tuple[list[str], list[str]]:
    """Give the command until its run has ended. Return the faults that were not reached, and what was wrong."""
    faults = ["disk", "disk", "prompts", "server", "server"]
    chance.shuffle(faults)
    wrong, ended = [], False  # whether the fault at the run's end has been
    for attempt in range(1, 100):
        log = machine.prompts.with_name(f"attempt{attempt}.log")
        before = written(run / "lora")

        def last_seconds(before: int = before, ended: bool = ended) -> bool:
            return not ended and written(run / "lora") != before

        fault = faults.pop(0) if faults else "kill"
        if fault == "prompts":
            machine.hide_prompts()
        process = start(command, log)
        wait(process, chance.uniform(60, 180) if fault == "kill" else chance.uniform(15, 40), last_seconds)
        if process.poll() is None and last_seconds():
            fault, ended = "end", True
        if process.poll() is None and fault in ("kill", "end"):
            process.kill()
        elif process.poll() is None and fault == "disk":
            machine.fill_disk(chance.randrange(3 * 2**20))
        elif process.poll() is None and fault == "server":
            machine.stop_server()
        status = process.wait()
        machine.repair()
        text = log.read_text(errors="replace")
        messages = [line for line in text.splitlines() if line.startswith("error: ")]
        print(f"{attempt:2} {fault:8} status {status:4}", *messages[:1], flush=True)
        if "Traceback" in text or len(messages) != (1 if status > 0 else 0):
            wrong.append(f"attempt {attempt}: {len(messages)} messages\n{text[-3000:]}")
        if status == 0:
            return [*faults, *([] if ended else ["end"])], wrong
    return faults, [*wrong, "the run did not end"]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings and lists with their names; tensors as tuples of bytes."""
    if isinstance(value, torch.Tensor):
        yield name, (value.dtype, tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{name}/{index}")
    else:
        yield name, value


def differences(quiet: Path, run: Path) -> list[str]:
    """Return the names of values that differ between two run folders, times and paths aside."""
    names = []
    for file in (LAST, BEST, Path("summary.json")):
        read = (lambda path: json.loads(path.read_text())) if file.suffix == ".json" else load
        first, second = (dict(leaves(read(folder / file))) for folder in (quiet, run))
        names += [
            f"{file}: {name}"
            for name in sorted(first.keys() | second.keys())
            if first.get(name) != second.get(name) and not any(part in name for part in DIFFERENT)
        ]
    lora = Path("lora") / "pytorch_lora_weights.safetensors"  # its metadata have sets, which Python orders by chance
    first, second = (dict(leaves(load_file(folder / lora))) for folder in (quiet, run))
    return [*names, *(["lora"] if first != second else [])]


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True, map_location="cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--port", type=int, default=8765)
    options, overrides = parser.parse_known_args()
    if os.geteuid() != 0:
        os.execvp("unshare", ["unshare", "--map-root-user", "--mount", sys.executable, *sys.argv])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(mounted(folder / "disk"))
        machine = Machine(folder, options.port)
        stack.callback(machine.stop_server)
        command = [
            *(sys.executable, "-m", "solrl_lightning", "ckpt=auto", f"iterations={options.iterations}"),
            *(f"data.train={machine.prompts}", "reward=http", f"reward.http.url=http://127.0.0.1:{options.port}/score"),
            *("reward.http.retries=3", "reward.http.backoff=0.2", *overrides),
        ]
        print(" ".join(command[1:]), flush=True)
        began = time.monotonic()
        log = folder / "quiet.log"
        if start([*command, f"hydra.run.dir={folder / 'quiet'}"], log).wait() != 0:
            raise SystemExit(f"the quiet run failed:\n{log.read_text()[-3000:]}")
        print(f"quiet: {time.monotonic() - began:.0f} s", flush=True)
        run = machine.disk / "run"
        missed, wrong = faulty([*command, f"hydra.run.dir={run}"], run, machine, random.Random(options.seed))
        print(f"faulty: {time.monotonic() - began:.0f} s with the quiet run")
        wrong += [f"not reached: {fault}" for fault in missed]
        with suppress(FileNotFoundError):
            wrong += [f"differs: {name}" for name in differences(folder / "quiet", run)]
        print("\n".join(wrong) or "equal: weights, optimiser, averages, evaluations, alarms and exported LoRA")
        return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
