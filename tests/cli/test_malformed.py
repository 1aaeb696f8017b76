"""Malformed command lines and files end in one line and status 2, with every file as it was.

The cases are what users mistype and what disks and networks spoil; test_entry.py and test_options.py have messages.
A function of cases writes files into a folder and yields (name, arguments), with paths relative to that folder.
"""

import copy
import io
import logging
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SMALL, Command, files_of

from solrl_lightning import __main__ as entry

Case = tuple[str, list[str]]
DEEP = b"[" * 200_000


def faults(command: Command, folder: Path, cases: Iterable[Case]) -> list[str]:
    """Return what is wrong with how each of ``cases`` ends; one line, status 2 and the same files are right."""
    faulty, before = [], files_of(folder)
    for name, arguments in cases:
        try:
            done = command(*arguments)
            lines = done.err.splitlines()
            if done.status != 2 or len(lines) != 1 or not lines[0].startswith("error: "):
                faulty.append(f"{name}: status {done.status}, {done.err!r}")
        except Exception as error:
            faulty.append(f"{name}: {error!r}")
        after = files_of(folder)
        if after != before:
            faulty.append(f"{name}: {sorted(key for key in after | before if after.get(key) != before.get(key))[:3]}")
            before = after
    return faulty


class TaskReachedError(Exception):
    """A malformed command line was accepted."""


@pytest.fixture
def no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(target: str) -> Callable[..., Any]:
        get_method(target)
        return accept

    def accept(cfg: Any) -> None:
        raise TaskReachedError

    get_method = entry.get_method
    monkeypatch.setattr(entry, "get_method", checked)


# Command lines: one of each kind

ONE_ARGUMENT = """
    optimizer._target_=torch.optim.Nowhere precision=fp3 reward=[] reward=[shapes,no] task=[train,audit] data.train=.
    data.train=hf://a data.train=shapes-trian model.preview_decoder=./nowhere trainer.accelerator=gpu hydra.run.dir=
    hydra.run.dir=/dev/null/run hydra.mode=SIDEWAYS hydra/launcher=nowhere iterations==3 iterations=[ iterations={
    data.train='a data.train=${ ''=1 iterations..x=3 iterations.x=3 family/sol_rl family=../model/tiny family= family=5
    family=null family=[sol_rl,compile] family={sol_rl:1} + ~ ~nothing ~iterations=5 ~seed ~model +nothing=1
    seed=${nothing} seed=${seed} seed=${oc.env:NOTHING_OF_THIS_NAME} ckpt= ckpt=[a] ckpt=. ckpt=/dev/null ckpt=last
""".split()
SEVERAL_ARGUMENTS = (
    ["data.train=\x07bell"],
    ["data.train=\ud800"],
    ["ckpt=" + "x" * 5000],
    ["hydra.run.dir=" + "x" * 5000],
    ["-m", "iterations=0,1"],
    ["-m", "family=glob(x*)"],
    ["-m", "seed=range(1,1)"],
    ["-m", "hydra/sweeper=nowhere", "seed=1,2"],
    ["-m", "seed=1,2", "hydra.sweep.subdir=same"],
    ["--config-name", "nowhere"],
    ["--config-path", "nowhere"],
    ["task=compare", "task.runs='['"],
    ["task=evaluate", "ckpt=nowhere.ckpt"],
)


@pytest.mark.usefixtures("no_task")
def test_command_lines(command: Command, tmp_path: Path) -> None:
    lines = [*([argument] for argument in ONE_ARGUMENT), *map(list, SEVERAL_ARGUMENTS)]
    assert faults(command, tmp_path, ((str(line), line) for line in lines)) == []


# Prompt files

PROMPT_FILES = {
    "empty.txt": b"",
    "blank.txt": b"\n  \n",
    "latin1.txt": "caf\u00e9".encode("latin-1"),
    "second.jsonl": b'{"prompt": "a red circle"}\n{"prompt": 5}\n',
    "deep.jsonl": b'{"prompt": ' + DEEP,
    "zeros.parquet": bytes(1000),
    "binary.csv": bytes(range(256)) * 20,
}


@pytest.mark.usefixtures("no_task")
def test_prompt_files(command: Command, tmp_path: Path) -> None:
    for name, content in PROMPT_FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    names = (*PROMPT_FILES, "folder.txt", "dangling.txt", "empty.txt/below.txt")
    cases = [
        *((name, [f"data.train={name}"]) for name in names),
        ("generate", ["task=generate", "task.prompt_file=latin1.txt"]),
    ]
    assert faults(command, tmp_path, cases) == []


# Files of a run


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    assert entry.main([*SMALL, "iterations=1", f"hydra.run.dir={folder}"]) == 0
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    return folder


def checkpoints(folder: Path, good: bytes) -> Iterator[Case]:
    """Files in the place of ``good``, the checkpoint of a run."""
    state = torch.load(io.BytesIO(good), weights_only=True)
    damaged = {f"cut at {share} %": good[: len(good) * share // 100] for share in (1, 99)}
    damaged |= {f"flipped at {share} %": flipped(good, len(good) * share // 100) for share in (20, 99)}
    damaged |= {"empty": b"", "zeros": bytes(len(good)), "html": b"<html>not found</html>"}
    for name, content in damaged.items():
        (folder / f"{name}.ckpt").write_bytes(content)
    states: dict[str, Any] = {
        "list": [{"pytorch-lightning_version": "2.6"}],
        "text": "pytorch-lightning_version",
        "weights": state["state_dict"],
        "foreign": {**state, "state_dict": {"layer.weight": torch.zeros(2)}, "callbacks": {}, "optimizer_states": [{}]},
        "code": {**state, "hyper_parameters": Path("x")},
        "step": {**state, "global_step": "five"},
        "shape": {**state, "state_dict": {name: value[:1] for name, value in state["state_dict"].items()}},
        "no state_dict": {name: value for name, value in state.items() if name != "state_dict"},
        "callbacks of text": {**state, "callbacks": "x"},
    }
    for name, value in states.items():
        torch.save(value, folder / f"{name}.ckpt")
    torch.save(state, folder / "old format.ckpt", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(folder / "zip.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", b"pytorch-lightning_version")
    for name in (*damaged, *states, "old format", "zip"):
        yield name, [*SMALL, f"ckpt='{name}.ckpt'"]
    for task, name in (("evaluate", "no state_dict"), ("export", "shape")):
        yield f"{task} {name}", [*SMALL, f"task={task}", f"ckpt='{name}.ckpt'"]


def test_checkpoints(command: Command, tmp_path: Path, run: Path) -> None:
    good = (run / "checkpoints" / "last.ckpt").read_bytes()
    assert faults(command, tmp_path, list(checkpoints(tmp_path, good))) == []


STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "text count": lambda state: state["loops"]["fit_loop"]["state_dict"].update(iterations_done="3"),
    "negative count": lambda state: state["loops"]["fit_loop"]["state_dict"].update(iterations_done=-1),
    "no loop": lambda state: state["loops"].pop("fit_loop"),
    "no optimizer": lambda state: state["optimizer_states"].clear(),
    "moment of another shape": lambda state: state["optimizer_states"][0]["state"][0].update(exp_avg=torch.zeros(2)),
    "half-precision adapters": lambda state: state.update(
        state_dict={name: value.bfloat16() for name, value in state["state_dict"].items()}
    ),
    "average of other names": lambda state: state["callbacks"]["WeightEMA"].update(average={"x": torch.zeros(2)}),
    "guard without rows": lambda state: state["callbacks"]["Guard"].pop("rows"),
}


def training_states(folder: Path, run: Path) -> Iterator[Case]:
    """Checkpoints with a spoilt training state in a folder with the record of ``run``."""
    (folder / "run" / "checkpoints").mkdir(parents=True)
    shutil.copytree(run / ".hydra", folder / "run" / ".hydra")
    good = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    for name, change in STATES.items():
        change(state := copy.deepcopy(good))
        torch.save(state, folder / "run" / "checkpoints" / f"{name}.ckpt")
        yield name, [f"ckpt='run/checkpoints/{name}.ckpt'", "iterations=2"]
    yield "export", ["task=export", "ckpt='run/checkpoints/average of other names.ckpt'"]


def test_training_states(command: Command, tmp_path: Path, run: Path) -> None:
    assert faults(command, tmp_path, list(training_states(tmp_path, run))) == []


def records(folder: Path, run: Path) -> Iterator[Case]:
    """Folders of ``run`` with a spoilt record or summary."""
    overrides = {"text": b"x: [", "list": b"- 'a=b=c'", "keys": b"a: 1", "number": b"5", "binary": b"\xff\x00"}
    summaries = {"text": b"x", "list": b"[]", "empty": b"", "keys": b"{}", "deep": DEEP, "binary": b"\xff"}
    for file, contents, arguments in (
        (".hydra/overrides.yaml", overrides, ["ckpt=last", "hydra.run.dir='{}'"]),
        (".hydra/config.yaml", {"text": b"a: [1", "empty": b""}, ["task=compare", "task.runs='{}'"]),
        ("summary.json", summaries, ["task=compare", "task.runs='{}'"]),
    ):
        for name, content in contents.items():
            copied = folder / f"{file.replace('/', ' ')} {name}"
            shutil.copytree(run, copied)
            (copied / file).write_bytes(content)
            yield copied.name, [argument.format(copied.name) for argument in arguments]


def test_records_of_runs(command: Command, tmp_path: Path, run: Path) -> None:
    assert faults(command, tmp_path, list(records(tmp_path, run))) == []


# Loggers


def test_key_that_the_writer_of_a_logger_does_not_take(command: Command, tmp_path: Path) -> None:
    assert faults(command, tmp_path, [("logger", [*SMALL, "+logger.tensorboard.foo=1"])]) == []
