"""Folders of runs: whether a new run may write there, and how a run goes on from a checkpoint.

A run records its own command line in ``.hydra/overrides.yaml``. Whoever names its checkpoint gets that command line
back, with what the new one says on top; so `ckpt=last` alone continues the newest run as it was.
"""

import os
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from solrl_lightning.config import ConfigTree
from solrl_lightning.errors import UserError

OUTPUTS = Path("outputs")
LAST = Path("checkpoints") / "last.ckpt"

# Any of these in a folder means that a run lives there.
_TRACES = ("summary.json", "checkpoints", "tensorboard", "lora", ".hydra", "multirun.yaml")

# Lightning writes its version beside the weights of every checkpoint.
_LIGHTNING_MARK = b"pytorch-lightning_version"


class Resumed(NamedTuple):
    """A command line with its checkpoint resolved."""

    arguments: list[str]
    checkpoint: Path | None
    folder: Path | None  # absolute, of the run that is continued in place
    message: str  # what goes on from where; empty without a checkpoint


def resume(tree: ConfigTree, arguments: Sequence[str], multirun: bool) -> Resumed:
    """Resolves `ckpt=`: finds the file, and puts the overrides that its run recorded before those given.

    Training from `ckpt=last` continues in the same folder; every other use of a checkpoint gets a new folder.
    """
    given = tree.parse(arguments)
    chosen = [override for override in given if override.key_or_group == "ckpt"]
    if not chosen or chosen[-1].value() in (None, "null"):
        return Resumed(list(arguments), None, None, "")
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
    check_checkpoint(checkpoint)
    source = checkpoint.resolve().parent.parent
    in_place = training and (value == "last" or (asked is not None and asked.resolve() == source))

    own = [o for o in given if o.key_or_group not in ("ckpt", "hydra.run.dir")]
    recorded = _recorded(tree, source, training, {o.key_or_group for o in own})
    merged = [*recorded, *(str(o.input_line) for o in own), f"ckpt={_quoted(checkpoint.resolve())}"]
    if in_place or asked is not None:
        merged.append(f"hydra.run.dir={_quoted(source if in_place else asked)}")
    message = (
        f"{'continuing' if in_place else 'from'} {checkpoint}, with what its run was given: {_listed(recorded)}; "
        f"given here: {_listed(o.input_line for o in own)}"
    )
    return Resumed(merged, checkpoint, source if in_place else None, message)


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
    file = folder / ".hydra" / "overrides.yaml"
    if not file.is_file():
        return []
    lines = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(lines, list)

    def holds(key: str) -> bool:
        other_task = key == "task" or (key.startswith("task.") and not training)
        return key not in overridden and key != "ckpt" and not other_task

    return [str(o.input_line) for o in tree.parse(lines) if holds(o.key_or_group)]


def _quoted(path: Path | None) -> str:
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


def check_new(folder: Path) -> None:
    """UserError for a folder that already holds a run."""
    traces = [name for name in _TRACES if (folder / name).exists()]
    if traces:
        raise UserError(
            f"The folder {folder} already holds a run ({', '.join(traces)}). Choose another with "
            "hydra.run.dir=<folder>, for a sweep hydra.sweep.dir=<folder>, or continue the run in it with "
            f"ckpt=last hydra.run.dir={folder}."
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
