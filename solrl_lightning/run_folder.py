"""Folders of runs: whether a new run may write there, how a run goes on from a checkpoint, and which are finished.

A run records its own command line in ``.hydra/overrides.yaml``. Whoever names its checkpoint gets that command line
back, with what the new one says on top; so `ckpt=last` alone continues the newest run as it was. A run that goes on in
its folder stays the experiment that it was begun as, and its record changes only once training has started again.
"""

import errno
import fcntl
import glob
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from solrl_lightning.config import ConfigTree, application_config
from solrl_lightning.errors import UserError

OUTPUTS = Path("outputs")
LAST = Path("checkpoints") / "last.ckpt"
_RECORD = Path(".hydra")
RECORDED_CONFIG = _RECORD / "config.yaml"
LOG = "solrl_lightning.log"  # hydra.job.name
_LOCK = ".lock"  # held by the process that runs in the folder
_NEXT_RECORD = _RECORD / "next"  # what a run that is to go on was given, until training has started

# In the folder of a run these keys and those below them may change: its length, what watches it, and how it is
# computed. All else makes it another experiment.
RESUMABLE_KEYS = (
    "iterations",
    "evaluation",
    "callbacks",
    "trainer",
    "logger",
    "hydra",
    "task",
    "ckpt",
    "family.compile",
    "precision.backend",
    "model.rollout_batch",
    "model.micro_batch",
    "model.decode_batch",
    "model.gradient_checkpointing",
    "model.pretrained",
    "model.embeddings",
    "data.eval",
    "data.eval_prompts",
    "data.eval_images",
)

# Any of these in a folder means that a run lives there.
_TRACES = ("summary.json", "checkpoints", "tensorboard", "lora", ".hydra", "multirun.yaml")

# Any of these makes a folder a run's, and not that of a sweep.
_RUN_MARKS = (".hydra", "checkpoints", "summary.json")

# What summary.json calls a run that ended as intended.
_FINISHED = ("completed", "stopped early")

# Lightning writes its version beside the weights of every checkpoint.
_LIGHTNING_MARK = b"pytorch-lightning_version"


class Resumed(NamedTuple):
    """A command line with its checkpoint resolved."""

    arguments: list[str]
    checkpoint: Path | None
    folder: Path | None  # absolute, of the run that is continued in place
    training: bool
    message: str  # what goes on from where; empty without a checkpoint


def resume(tree: ConfigTree, arguments: Sequence[str], multirun: bool) -> Resumed:
    """Resolves `ckpt=`: finds the file, and puts the overrides that its run recorded before those given.

    Training from `ckpt=last` continues in the same folder; every other use of a checkpoint gets a new folder.
    """
    given = tree.parse(arguments)
    chosen = [override for override in given if override.key_or_group == "ckpt"]
    if not chosen or chosen[-1].value() in (None, "null"):
        return Resumed(list(arguments), None, None, False, "")
    if chosen[-1].is_sweep_override():
        raise UserError(f"ckpt takes one file; got {chosen[-1].input_line}. Start a run for each.")
    value = str(chosen[-1].value())
    training = all(override.value() == "train" for override in given if override.key_or_group == "task")
    asked = _run_dir(given)
    if value == "last" and multirun:
        raise UserError("ckpt=last continues one run, so it does not go with -m. Name the file with ckpt=<file>.")
    checkpoint = Path(value)
    if value == "last":
        checkpoint = (asked / LAST) if asked is not None and training else newest_checkpoint()
        if not checkpoint.is_file():
            raise UserError(
                f"ckpt=last continues the run in {asked}, which has no {LAST}: it was stopped before its first "
                f"checkpoint. Remove {asked} and give the command that started it again."
            )
    check_checkpoint(checkpoint)
    source = checkpoint.resolve().parent.parent
    in_place = training and not multirun and (value == "last" or (asked is not None and asked.resolve() == source))

    sources = [] if tree.own_sources else _recorded_sources(source)
    tree.look_in(sources)
    own = [o for o in given if o.key_or_group not in ("ckpt", "hydra.run.dir")]
    recorded = _recorded(tree, source, training, {o.key_or_group for o in own})
    given_here = [str(o.input_line) for o in own]
    merged = [*recorded, *given_here, f"ckpt={_quoted(checkpoint.resolve())}"]
    if in_place:
        _check_as_begun(tree, source, checkpoint, own, [*recorded, *given_here])
        # First, so that a further rank's own hydra.output_subdir=null, which keeps it from writing, stands.
        merged.insert(0, f"hydra.output_subdir={_NEXT_RECORD.as_posix()}")
    merged[:0] = searched(sources)
    if in_place or asked is not None:
        merged.append(f"hydra.run.dir={_quoted(source if in_place else asked)}")
    begun = _recorded(tree, source, training, set())
    message = (
        f"{'continuing' if in_place else 'from'} {checkpoint}, with what its run was given: "
        f"{_listed([*searched(sources), *begun])}; given here, on top of it: {_listed(given_here)}"
    )
    return Resumed(merged, checkpoint, source if in_place else None, training, message)


def commit_overrides(folder: Path) -> None:
    """What the run in ``folder`` goes on with becomes its record."""
    for file in (folder / _NEXT_RECORD).iterdir():
        os.replace(file, folder / _RECORD / file.name)
    (folder / _NEXT_RECORD).rmdir()


def is_resuming(folder: Path) -> bool:
    """Whether a run in ``folder`` is to go on and `commit_overrides` has not been called yet."""
    return (folder / _NEXT_RECORD).is_dir()


def _check_as_begun(
    tree: ConfigTree, folder: Path, checkpoint: Path, own: Sequence[Override], arguments: Sequence[str]
) -> None:
    """UserError if ``arguments``, of which ``own`` are given anew, change what the run in ``folder`` has to keep."""
    begun = _recorded(tree, folder, True, set())
    fresh = [o for o in own if o.input_line not in begun and not o.is_sweep_override()]
    suspects = [o for o in fresh if not is_subkey_of_any(_dotted(o), RESUMABLE_KEYS)]
    if not suspects or not (folder / _RECORD / "overrides.yaml").is_file():
        return
    plain = [str(o.input_line) for o in tree.parse(arguments) if not o.is_sweep_override()]
    changed = _differences(tree, folder, begun, plain)
    changed = [key for key in changed if not is_subkey_of_any(key, RESUMABLE_KEYS)]
    if not changed:
        return
    named = [o for o in suspects if any(is_subkey(key, _dotted(o)) or is_subkey(_dotted(o), key) for key in changed)]
    culprits = _listed(o.input_line for o in named or suspects)  # an experiment changes keys of any name
    examples = f"{', '.join(changed[:3])}{' and more' if len(changed) > 3 else ''}"
    raise UserError(
        f"Cannot resume {folder}: {culprits} changes {examples}. Leave it out, or start a new folder from that state: "
        f"ckpt={checkpoint} {culprits}. Keys that may change: {', '.join(RESUMABLE_KEYS)}."
    )


def _differences(tree: ConfigTree, folder: Path, begun: Sequence[str], now: Sequence[str]) -> list[str]:
    """Keys that two command lines set to different values, without those that only follow another key."""
    configurations = [tree.compose(begun), tree.compose(now)]
    written = _unequal(*(leaves(OmegaConf.to_container(cfg, resolve=False)) for cfg in configurations))
    resolved = _unequal(*(leaves(OmegaConf.to_container(application_config(cfg, folder))) for cfg in configurations))
    return sorted(written & resolved)


def _unequal(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    absent = object()
    return {key for key in first.keys() | second.keys() if first.get(key, absent) != second.get(key, absent)}


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; a list is one value."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    below = [leaves(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in tree.items()]
    return {key: value for leaves in below for key, value in leaves.items()}


def _dotted(override: Override) -> str:
    return override.key_or_group.replace("/", ".")


def is_subkey(key: str, root: str) -> bool:
    return key == root or key.startswith(f"{root}.")


def is_subkey_of_any(key: str, roots: Iterable[str]) -> bool:
    return any(is_subkey(key, root) for root in roots)


def _listed(overrides: Iterable[object]) -> str:
    return " ".join(map(str, overrides)) or "nothing"


def _run_dir(overrides: Iterable[Override]) -> Path | None:
    values = [str(o.value()) for o in overrides if o.key_or_group == "hydra.run.dir"]
    return Path(values[-1]) if values else None


def newest_checkpoint() -> Path:
    """Of the training runs under outputs/, the last checkpoint that is the newest."""
    found = list(OUTPUTS.rglob(str(LAST)))
    if not found:
        raise UserError(
            f"ckpt=last takes the newest run that has {LAST}; there is none under {OUTPUTS.resolve()}. "
            "Go to the folder where it was started, or name a file with ckpt=<file>."
        )
    return max(found, key=lambda file: file.stat().st_mtime)


def _recorded(tree: ConfigTree, folder: Path, training: bool, overridden: set[str]) -> list[str]:
    """What the run in ``folder`` was started with, as far as it holds for this one and is not given anew."""
    file = folder / _RECORD / "overrides.yaml"
    if not file.is_file():
        return []
    lines = OmegaConf.to_container(_read_record(file, ListConfig))
    assert isinstance(lines, list)

    def holds(key: str) -> bool:
        other_task = key == "task" or (key.startswith("task.") and not training)
        return key not in overridden and key != "ckpt" and not other_task

    return [str(o.input_line) for o in tree.parse(lines) if holds(o.key_or_group)]


def _read_record(file: Path, kind: type[ListConfig] | type[DictConfig]) -> Any:
    try:
        record = OmegaConf.load(file)
        whole = isinstance(record, kind) and (kind is ListConfig or "hydra" in record)
        damaged = "" if whole else "it holds something else"
    except (YAMLError, OmegaConfBaseException, OSError, ValueError) as error:  # OSError for a number
        damaged = " ".join(str(error).split())
    if damaged:
        raise UserError(
            f"{file}, the record of the run's command line, is damaged: {damaged}. Restore it; or remove it, and give "
            "all of that command line beside ckpt."
        )
    return record


def own_sources(hydra: DictConfig) -> list[str]:
    """Where Hydra, of this configuration, looked for options beside the package and itself."""
    sources = [source for source in hydra.runtime.config_sources if "command-line" in source.provider]
    return [
        f"file://{Path(hydra.runtime.cwd) / source.path}"
        if source.schema == "file"
        else f"{source.schema}://{source.path}"
        for source in sources
    ]


def searched(sources: Sequence[str]) -> list[str]:
    """The override that makes Hydra look for options in ``sources``, if there are any."""
    return [f"hydra.searchpath=[{','.join(map(_quoted, sources))}]"] if sources else []


def _recorded_sources(folder: Path) -> list[str]:
    """Where the run in ``folder`` had options of its user's from."""
    file = folder / _RECORD / "hydra.yaml"
    if not file.is_file():
        return []
    sources = own_sources(_read_record(file, DictConfig).hydra)
    gone = [source for source in sources if source.startswith("file://") and not Path(source[7:]).is_dir()]
    if gone:
        raise UserError(
            f"The run in {folder} had options from the folder {gone[0][7:]}, which is not there. Say where they are "
            "now with --config-dir <folder>."
        )
    return sources


def _quoted(path: Path | str | None) -> str:
    """A path as a value of Hydra's grammar."""
    escaped = str(path).replace("'", "\\'")
    return f"'{escaped}'"


def check_checkpoint(file: Path) -> None:
    """UserError for a file that is missing, damaged, or no checkpoint of a training run. Unpickles nothing."""
    if not file.is_file():
        raise UserError(f"ckpt must be a checkpoint file or `last`; there is no file {file}.")
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
            pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
            ours = not damaged and any(_LIGHTNING_MARK in archive.read(name) for name in pickles)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(
            f"The checkpoint {file} is damaged or cut short ({error}). Take another checkpoint, or start the run again."
        ) from error
    if damaged:
        raise UserError(f"The checkpoint {file} is damaged at {damaged}. Take another one, or start the run again.")
    if not ours:
        raise UserError(f"{file} is no checkpoint of a training run: those are checkpoints/*.ckpt in the run's folder.")


def check_contents(ckpt: Path, iterations: int | None) -> int:
    """The iteration that a checkpoint was written after.

    Raises:
        UserError: the file holds something else, or its run is already as long as it is asked to be.
    """
    from solrl_lightning.files import iterations_done, read_checkpoint  # here: it imports torch

    done = iterations_done(read_checkpoint(ckpt))
    if iterations is not None and done >= iterations:
        raise UserError(
            f"a resumed run needs iterations left to do; {ckpt} has done {done} and iterations={iterations}. Raise "
            f"it, as in iterations={done + 10}, or write the LoRA with task=export ckpt={ckpt}."
        )
    return done


def check_new(folder: Path) -> None:
    """UserError for a folder that already holds a run."""
    traces = [name for name in _TRACES if (folder / name).exists()]
    if traces:
        goes_on = f"continue the run in it with ckpt=last hydra.run.dir={folder}"
        way_on = goes_on if (folder / LAST).exists() else "remove it: there is no checkpoint in it to go on from"
        raise UserError(
            f"The folder {folder} already holds a run ({', '.join(traces)}). Choose another with "
            f"hydra.run.dir=<folder>, for a sweep hydra.sweep.dir=<folder>, or {way_on}."
        )


def check_free(folder: Path) -> None:
    """UserError for a folder in which a run is going on."""
    if (folder / _LOCK).is_file():
        with open(folder / _LOCK, "r+") as file:
            _lock(file, folder)


@contextmanager
def claimed(folder: Path, new: bool) -> Iterator[None]:
    """Keeps ``folder`` from other processes; makes it, and on leaving removes it if it is still empty.

    Args:
        new: refuse one that holds a run. Another process may have begun and ended it since `check_new`.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "a") as file:
        _lock(file, folder)
        try:
            if new:
                check_new(folder)
            yield
        finally:
            with suppress(OSError):  # the folder may be gone
                (folder / _LOCK).unlink()
            for path in made:
                with suppress(OSError):  # one that is not empty stays
                    path.rmdir()


def _lock(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it with the process, also after a kill
    except BlockingIOError:
        used = True
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # Lustre and NFS mounted without locks
            raise
        used = False
    else:
        used = os.fstat(file.fileno()).st_nlink == 0  # its holder removed it after this process had opened it
    if used:
        raise UserError(
            f"The folder {folder} is in use: a run in it has not ended. Wait for it, or choose another folder with "
            "hydra.run.dir=<folder>, for a sweep hydra.sweep.dir=<folder>."
        )


def check_writable(folder: Path) -> None:
    """UserError for a folder that cannot be made or written. Leaves nothing behind."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        # Writing is the only reliable test: permission bits say nothing about read-only mounts, or to root.
        with tempfile.TemporaryDirectory(dir=existing, prefix=".solrl-"):
            pass
    except OSError as error:
        raise UserError(
            f"The run's folder {folder} cannot be written: {os.strerror(error.errno or 0)} at {existing}. "
            "Choose another with hydra.run.dir=<folder>."
        ) from error


def remove_unused(folder: Path) -> None:
    """A run that has left nothing but its command line and its log goes, so that the same command can come again."""
    if {entry.name for entry in folder.iterdir()} <= {_RECORD.name, LOG, _LOCK}:
        shutil.rmtree(folder)


# Finished runs


class Run(NamedTuple):
    """A finished run."""

    folder: str
    summary: dict[str, Any]

    @property
    def seed(self) -> Any:
        return self.summary["config"]["seed"]


def finished_runs(pattern: str) -> tuple[list[Run], dict[str, str]]:
    """The finished runs among what a glob matches, and why each of the others is left out. UserError without any."""
    folders = matching_runs(pattern)
    runs, left_out = read_runs(folders)
    if not runs:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in left_out.items())
        raise UserError(f"compare takes finished runs; of {len(folders)} that match {pattern} none is: {reasons}")
    return runs, left_out


def matching_runs(pattern: str) -> list[Path]:
    """The run folders among what a glob matches, numbers in their names in numerical order."""
    folders = [Path(match) for match in glob.glob(str(pattern))]
    runs = [folder for folder in folders if any((folder / mark).exists() for mark in _RUN_MARKS)]
    if not runs:
        found = f"{len(folders)} files or folders, none of which is a run's" if folders else "nothing"
        raise UserError(
            f"task.runs is a glob that matches run folders; {pattern}, looked up in {Path.cwd()}, matches {found}. "
            "Give one that matches runs, in quotes: 'task.runs=outputs/multirun/*/*'"
        )
    return sorted(runs, key=lambda run: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", str(run))])


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """The finished runs, and why each of the others is left out."""
    runs, left_out = [], {}
    for folder in folders:
        file = folder / "summary.json"
        summary = _read_summary(file) if file.is_file() else {"status": "has no summary.json (yet)"}
        if summary["status"] not in _FINISHED:
            left_out[str(folder)] = summary["status"]
        elif summary["final_reward"] is None:
            left_out[str(folder)] = "never evaluated"
        elif not (folder / RECORDED_CONFIG).is_file():
            left_out[str(folder)] = f"has no {RECORDED_CONFIG}"
        else:
            runs.append(Run(str(folder), summary))
    return runs, left_out


def _read_summary(file: Path) -> dict[str, Any]:
    try:
        summary = json.loads(file.read_text())
    except (ValueError, RecursionError):  # endless brackets are a RecursionError
        summary = None
    whole = isinstance(summary, dict) and summary.keys() >= {"status", "final_reward", "evaluations", "config"}
    return summary if whole else {"status": "its summary.json is damaged"}
