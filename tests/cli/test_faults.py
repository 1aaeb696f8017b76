"""External faults: full disks, kills at any time, damaged files, two runs in one folder, a hub that hangs, a reward
server that dies.

After each of them old files are intact, there are no partial files, and one line names a fix.
"""

import errno
import importlib
import io
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import small_runs
import torch
from forks import Forks
from lightning.pytorch import Callback, LightningModule, Trainer
from reward_servers import free_port, kill, start, started
from small_runs import Command, checkpoint, files_of, the_line

from solrl_lightning.artifacts.complete import reading
from solrl_lightning.artifacts.files import (
    WholeCheckpointIO,
    opened_atomically,
    read_checkpoint,
    write_atomically,
    written_whole,
)
from solrl_lightning.cli.console import report_error
from solrl_lightning.errors import OutOfMemory, RankLost, UserError, WriteError

SMALL = [*small_runs.SMALL, "iterations=3"]


def test_no_line_names_a_log_that_is_not_there(command: Command) -> None:
    assert "solrl_lightning.log" in command(*SMALL, "iterations=1").out
    assert "solrl_lightning.log" not in command(*SMALL, "iterations=1", "hydra/job_logging=none").out


# Full disks


def limit_files(size: int) -> None:
    """Limit files of this process to ``size`` bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def small_disk(size: int = 2**30) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit_files(size)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_lora(folder: Path, size: int) -> None:
    from safetensors.torch import save_file

    with written_whole(folder) as part:
        save_file({"weight": torch.zeros(size)}, part / "weights.safetensors")


@pytest.mark.parametrize(
    "write",
    [
        lambda folder, size: write_atomically(folder / "summary.json", bytes(size)),
        lambda folder, size: WholeCheckpointIO().save_checkpoint({"weight": torch.zeros(size)}, folder / "last.ckpt"),
        write_lora,
    ],
    ids=["file", "checkpoint", "folder"],
)
def test_failed_write_keeps_old_file(tmp_path: Path, write: Callable[[Path, int], None]) -> None:
    folder = tmp_path / "run"
    write(folder, 10)
    before = files_of(tmp_path)
    with small_disk(20_000), pytest.raises(WriteError, match="run.* could not be written: .*File too large"):
        write(folder, 30_000)
    assert files_of(tmp_path) == before
    write(folder, 30_000)
    assert files_of(tmp_path).keys() == before.keys() and files_of(tmp_path) != before


def test_ctrl_c_while_a_checkpoint_is_written_stays_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.BytesIO):
        def write(self, data: Any, /) -> int:
            if self.tell() > 1000:
                raise KeyboardInterrupt
            return super().write(data)

    monkeypatch.setattr("solrl_lightning.artifacts.files.opened_atomically", lambda path: nullcontext(Interrupted()))
    with pytest.raises(KeyboardInterrupt):
        WholeCheckpointIO().save_checkpoint({"weight": torch.zeros(10_000)}, tmp_path / "last.ckpt")


def test_ctrl_c_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    write_atomically(tmp_path / "last.ckpt", b"old")
    with pytest.raises(KeyboardInterrupt), opened_atomically(tmp_path / "last.ckpt") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert files_of(tmp_path) == {"last.ckpt": b"old"}


def test_files_are_written_where_a_mount_has_no_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.chmod", refuse)
    write_lora(tmp_path / "run", 10)
    assert (tmp_path / "run" / "weights.safetensors").is_file()


def test_lora_files_have_permissions_of_folder(tmp_path: Path) -> None:
    write_lora(tmp_path / "lora", 10)
    (tmp_path / "plain").touch()
    assert (tmp_path / "lora" / "weights.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_checkpoint_leaves_out_states_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights, writer = torch.arange(3.0), WholeCheckpointIO()
    base = {"global_step": 1, "state_dict": {"w": weights}, "loops": {}, "optimizer_states": [{"lr": np.float64(0.1)}]}
    fine = {"mean": np.float64(0.1), "best": [np.int64(3), (np.bool_(True), None)], "size": weights.shape, "w": weights}
    fine["counts"] = np.arange(6, dtype=">i2").reshape(2, 3)[::-1]
    odd = {
        "where": [tmp_path],
        "when": datetime.now(),
        "array": np.array(["text"]),
        "code": lambda: 0,
        "ns": np.timedelta64(1, "ns"),
    }
    states = {"Fine": fine, **{f"Odd{name}": {name: value} for name, value in odd.items()}}
    for _ in range(2):  # the second one tells nothing new
        writer.save_checkpoint({**base, "callbacks": states, "hook": tmp_path}, tmp_path / "last.ckpt")
    read = read_checkpoint(tmp_path / "last.ckpt")
    assert read["callbacks"].keys() == {"Fine"} and "hook" not in read
    assert type(read["optimizer_states"][0]["lr"]) is float and read["optimizer_states"] == base["optimizer_states"]
    mean, best, *_, counts = read["callbacks"]["Fine"].values()
    assert torch.equal(counts, torch.tensor([[3, 4, 5], [0, 1, 2]], dtype=torch.int16))
    assert (type(mean), type(best[0]), best) == (float, int, [3, (True, None)])
    assert len(caplog.messages) == len(odd) + 1
    assert "state of the callback Oddwhere stays out of the checkpoints" in caplog.text
    assert "refuses state['where'][0], a pathlib." in caplog.text
    with pytest.raises(UserError, match=r"refuses optimizer_states\[0\]\['file'\], a pathlib"):
        writer.save_checkpoint({**base, "optimizer_states": [{"file": tmp_path}]}, tmp_path / "last.ckpt")


NO_CHECKPOINT, NO_EXPORT = (
    f"callbacks.checkpoint._target_={__name__}.NoCheckpoint",
    "callbacks.export._target_=lightning.pytorch.Callback",
)
GRID = ("callbacks.sample_grid.every=1", "callbacks.sample_grid.seeds_per_prompt=8")
LONG_SUMMARY = f"+callbacks.summary.hparams.note={'n' * 2**14}"


class NoCheckpoint(Callback):
    def __init__(self, dirpath: str, every: int | None) -> None:
        pass


class FillDisk(Callback):
    """Limits files to ``size`` bytes after the first iteration."""

    def __init__(self, size: int) -> None:
        self.size = size

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            limit_files(self.size)


@pytest.mark.parametrize(
    ("file", "size", "arguments"),
    [
        ("checkpoints/last.ckpt", 2**20, []),
        ("samples/grid_000002.png", 2**14, [NO_CHECKPOINT, "~logger", *GRID]),
        ("lora", 2**20, [NO_CHECKPOINT]),
        # Without a logger, as TensorBoard's thread would write after the test, when the folder is gone.
        ("summary.json", 2**14, [NO_CHECKPOINT, NO_EXPORT, "~logger", LONG_SUMMARY]),
    ],
)
def test_full_disk_ends_run_with_one_line_and_no_partial_file(
    command: Command, tmp_path: Path, file: str, size: int, arguments: list[str]
) -> None:
    fault = [f"+callbacks.full._target_={__name__}.FillDisk", f"+callbacks.full.size={size}"]
    with small_disk():
        done = command(*SMALL, "~callbacks.best", "iterations=2", "hydra.run.dir=run", *arguments, *fault)
    assert done.status == 1
    line = the_line(done.err)
    assert f"run/{file} could not be written: " in line and "File too large" in line and "Free space" in line
    left = files_of(tmp_path / "run")
    assert not [path for path in left if path.endswith(".tmp")]
    if file == "checkpoints/last.ckpt":
        assert checkpoint(tmp_path / "run")["global_step"] == 1
        assert "ckpt=last hydra.run.dir=" in line
    else:
        assert not (tmp_path / "run" / file).exists()
        assert "then give the same command again with ckpt=auto hydra.run.dir=" in line


# Kills


def tensors(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    return {name: value for key, inner in items for name, value in tensors(inner, f"{path}/{key}").items()}


def assert_equal_to_the_bit(run: Path, expected: Path) -> None:
    """Return adapters, optimiser state and average."""
    loaded = [checkpoint(folder) for folder in (run, expected)]
    assert loaded[0]["global_step"] == loaded[1]["global_step"] == 3
    # A run that ended earlier, or was killed, may have another number of evaluations.
    first, second = ({k: v for k, v in tensors(state).items() if "/Guard/" not in k} for state in loaded)
    assert first.keys() == second.keys() and len(first) > 300
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.slow
def test_run_killed_while_saving_resumes_from_previous_checkpoint(forks: Forks, tmp_path: Path) -> None:
    straight = forks.run(tmp_path, *SMALL, "hydra.run.dir=straight")
    assert straight.status == 0, straight.output
    assert forks.run(tmp_path, *SMALL, "iterations=1", "hydra.run.dir=run").status == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    before = checkpoint.read_bytes()
    more = ("ckpt=last", "hydra.run.dir=run", "iterations=3")
    assert forks.run(tmp_path, *more, file_limit=2**21).status == -signal.SIGXFSZ
    assert checkpoint.read_bytes() == before
    best = checkpoint.with_name("best.ckpt")
    (part,) = (file for file in checkpoint.parent.iterdir() if file not in (checkpoint, best))
    assert part.stat().st_size == 2**21  # killed in the middle of the write
    done = forks.run(tmp_path, *more)
    assert done.status == 0, done.output
    assert_equal_to_the_bit(tmp_path / "run", tmp_path / "straight")
    assert set(checkpoint.parent.iterdir()) == {checkpoint, best}


# Reward servers


class KillServer(Callback):
    """Calls ``kill`` after the first iteration."""

    kill: Callable[[], None]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            type(self).kill()


@pytest.mark.slow
def test_run_survives_a_restart_of_its_reward_server_and_resumes_after_its_end(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/score"
    fault = f"+callbacks.fault._target_={__name__}.KillServer"
    http = ("reward=http", f"reward.http.url={url}", "reward.http.batch=3", "reward.http.backoff=0.02", fault)
    server = start("example_server.py", port)

    def restart() -> None:
        nonlocal server
        time.sleep(0.2)
        server = start("example_server.py", port)

    def kill_and_restart() -> None:
        kill(server)
        Thread(target=restart).start()

    try:
        for name, at_fault in {"straight": lambda: None, "restarted": kill_and_restart}.items():
            monkeypatch.setattr(KillServer, "kill", at_fault, raising=False)
            done = command(*SMALL, *http, f"hydra.run.dir={name}")
            assert done.status == 0, done.err
        assert_equal_to_the_bit(tmp_path / "restarted", tmp_path / "straight")

        monkeypatch.setattr(KillServer, "kill", lambda: kill(server))
        done = command(*SMALL, *http, "reward.http.retries=2", "hydra.run.dir=dead")
    finally:
        kill(server)
    assert done.status == 1
    line = the_line(done.err)
    assert f"the reward server {url}, asked about the prompt 'a " in line and "does not answer: " in line
    assert "Start or correct the server, then continue the run with ckpt=last hydra.run.dir=" in line
    assert checkpoint(tmp_path / "dead")["global_step"] == 1
    monkeypatch.setattr(KillServer, "kill", lambda: None)
    with started("example_server.py", free_port()) as moved:
        done = command("ckpt=last", "hydra.run.dir=dead", f"reward.http.url={moved}")
    assert done.status == 0, done.err
    assert_equal_to_the_bit(tmp_path / "dead", tmp_path / "straight")


# Ranks


PEER = """
import os, torch, torch.distributed as d
d.init_process_group("gloo", init_method="{}", rank=1, world_size=2)
d.barrier()
os._exit(9)
"""


@pytest.mark.slow
def test_rank_that_loses_another_says_so_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meeting = f"tcp://127.0.0.1:{free_port()}"
    peer = subprocess.Popen([sys.executable, "-c", PEER.format(meeting)])
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=2)
    try:
        torch.distributed.barrier()
        with pytest.raises(RuntimeError) as caught:
            torch.distributed.all_reduce(torch.zeros(1))
    finally:
        torch.distributed.destroy_process_group()
        peer.wait()
    assert isinstance(report_error(caught.value, tmp_path), RankLost)
    assert the_line(capsys.readouterr().err).startswith("error: another rank of this run has ended.")


@pytest.mark.parametrize(
    ("code", "reason", "line"),
    [
        (
            "raise ValueError('mutable default')",
            "mutable default",
            "plugin a_sweeper: ValueError: mutable default. Update it, or run pip uninstall a-sweeper.",
        ),
        (
            "import random\n\ndef sweep():\n    random.sample([1], 2)\n",
            "larger than population",
            "Hydra cannot use this command line: ValueError in hydra_plugins: Sample larger than population or is "
            "negative. Correct the value or the hydra.* option that causes it.",
        ),
    ],
    ids=["that cannot be imported", "that does not take an option"],
)
def test_error_of_a_plugin_of_hydra_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    code: str,
    reason: str,
    line: str,
) -> None:
    folder = tmp_path / "hydra_plugins" / "a_sweeper"
    folder.mkdir(parents=True)
    (folder / "config.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=reason) as caught:
        importlib.import_module("hydra_plugins.a_sweeper.config").sweep()
    assert isinstance(report_error(caught.value, in_job=False), UserError)
    assert the_line(capsys.readouterr().err).endswith(line)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee"), "CUDA out of memory. Tried to"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc"),
        (RuntimeError("could not create a memory object"), "could not create a memory object"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), "[enforce fail] DefaultCPUAllocator: "),
    ],
)
def test_full_device_ends_with_options_that_take_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, message: str
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    assert isinstance(report_error(error, tmp_path), OutOfMemory)
    line = the_line(capsys.readouterr().err)
    assert line.startswith(f"error: the device has no memory left: {message}")
    assert "model.gradient_checkpointing=true" in line and "ckpt=last hydra.run.dir=" in line


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "Resource")])
def test_limit_on_processes_is_no_damaged_file(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a library has wrapped it, as when it reads a model's weights in threads."""
    with pytest.raises(type(error)) as raised, reading("model.pretrained=flux is invalid"):
        raise error
    assert isinstance(report_error(raised.value), UserError)
    assert "limit on processes is reached. Raise it (ulimit -u" in the_line(capsys.readouterr().err)


# Callbacks


class ReadsNothing(Callback):
    """A callback of the user's own with a mistake."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.callback_metrics["nothing"]


def test_metric_of_a_callback_of_lightning_that_is_not_there_is_an_error_of_one_line(command: Command) -> None:
    def run(name: str, callback: str) -> Any:
        return command(*SMALL, f"hydra.run.dir={name}", f"+callbacks.mine={{_target_:{callback}}}")

    for kind, reason in {
        "EarlyStopping": "val_loss` which is not",
        "ModelCheckpoint": "could not find the mon",
    }.items():
        done = run(kind, f"lightning.pytorch.callbacks.{kind},monitor:val_loss")
        line = the_line(done.err)
        assert done.status == 2 and line.startswith("error: callbacks.mine is invalid: "), line
        assert reason in line and "eval/shapes" in line
        assert line.endswith(". Set callbacks.mine.monitor=<metric>, or leave it out with ~callbacks.mine.")
    with pytest.raises(KeyError, match="nothing"):  # with its traceback
        run("own", f"{__name__}.ReadsNothing")


def test_error_with_a_picture_of_a_megabyte_in_base64_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """By searches in time that is linear in the length of a word; another one takes minutes."""
    report_error(UserError("A" * 10**6))
    assert capsys.readouterr().err.startswith("error: AAAA")
    library = ImportError("/lib/libtorch.so: failed to map segment from shared object")
    assert "/lib/libtorch.so cannot be loaded: " in str(report_error(library))
