"""Folders of runs: whether a run may write there, who holds it, and when it is removed."""

import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from solrl_lightning.artifacts.formatting import path_option
from solrl_lightning.errors import FolderLost, UserError

log = logging.getLogger(__name__)

LAST = Path("checkpoints") / "last.ckpt"
BEST = Path("checkpoints") / "best.ckpt"
LOG = "solrl_lightning.log"  # hydra.job.name
RECORD = Path(".hydra")
NEXT_RECORD = RECORD / "next"  # overrides of a resumed run, until training has started
_LOCK = ".lock"  # held by the process that runs in the folder
_TRACES = "summary.json checkpoints tensorboard lora transformer .hydra".split()  # marks of a run, by its first rank
_WRITTEN = "checkpoints samples lora transformer .hydra".split()  # a logger that cannot write costs a run nothing
_SWEEP = "multirun.yaml"  # by any rank, perhaps before the first one has looked
_claims = dict[Path, int]()  # folders of the runs of this process, and their open descriptors
OTHER_FOLDER = "hydra.run.dir=<folder>, for a sweep hydra.sweep.dir=<folder>"


def commit_overrides(folder: Path) -> None:
    """Make the overrides of a resumed run the record of its ``folder``."""
    for file in (folder / NEXT_RECORD).iterdir():
        os.replace(file, folder / RECORD / file.name)
    (folder / NEXT_RECORD).rmdir()


def is_resuming(folder: Path) -> bool:
    """Return whether a run resumes in ``folder`` and `commit_overrides` has not been called yet."""
    return (folder / NEXT_RECORD).is_dir()


def run_of(checkpoint: Path) -> Path:
    """Return the absolute folder of a checkpoint's run, in which ``checkpoints/`` or the file may be a link.

    Links to the checkpoint outside of a run lead to the run.
    """
    file = checkpoint.absolute()
    places = [file.parent.parent]
    while not (places[-1] / RECORD).is_dir() and (link := next(filter(Path.is_symlink, (file, file.parent)), None)):
        target = Path(os.path.normpath(os.path.realpath(link.parent) / link.readlink()))
        file = target if link == file else target / file.name
        places.append(file.parent.parent)
    folder = places[-1] if (places[-1] / RECORD).is_dir() else places[0]
    return Path(os.path.realpath(folder))


def check_new(folder: Path) -> None:
    """Raise UserError for a folder that already holds a run, or a sweep with the record of a run."""
    traces = [name for name in _TRACES if (folder / name).exists()]
    records = folder.rglob(f"{RECORD}/hydra.yaml") if (folder / _SWEEP).is_file() else ()
    jobs = sorted(file.parent.parent for file in records if "\n  mode: MULTIRUN\n" in file.read_text())
    job = min(jobs, key=_has_finished, default=None)
    if traces or job:
        checkpoints = [name for name in (LAST, BEST) if (folder / name).exists() and (folder / RECORD).is_dir()]
        longer = " iterations=<number>" * _has_finished(job or folder)
        if job:
            fix = f"continue a run of it with task=train ckpt=last {path_option('hydra.run.dir', job)}{longer}"
        elif LAST in checkpoints:
            fix = (
                f"continue the run in it with task=train ckpt=last {path_option('hydra.run.dir', folder)}{longer}, or "
                f"take its weights into another with {path_option('ckpt', folder / LAST)}"
            )
        elif checkpoints:
            fix = f"branch from its best evaluation with {path_option('ckpt', folder / BEST)}; {LAST} is missing"
        else:
            fix = "move or remove it: there is no checkpoint in it, with the record of a run, to resume from"
        content = f"sweep ({_SWEEP})" if job else f"run ({', '.join(traces)})"
        raise UserError(f"The folder {folder} already holds a {content}. Choose another with {OTHER_FOLDER}, or {fix}.")


def _has_finished(folder: Path) -> bool:
    from solrl_lightning.artifacts.finished_runs import FINISHED, read_summary

    return read_summary(folder)["status"] in FINISHED


def branch_elsewhere(folder: Path) -> str:
    """Return the options that continue the run in ``folder`` in another one."""
    return f"{path_option('ckpt', folder / LAST)} hydra.run.dir=<folder>"


def check_free(folder: Path, other: str = OTHER_FOLDER) -> None:
    """Raise UserError for a folder that another process runs in. ``other``: the options that choose another folder."""
    if (folder / _LOCK).is_file():
        with _opened(folder / _LOCK, os.O_RDWR) as lock:
            _lock(lock, folder, other)


@contextmanager
def claimed(folder: Path, new: bool, other: str = OTHER_FOLDER) -> Iterator[None]:
    """Make and lock ``folder``, and remove it on exit if it is still empty.

    ``new``: whether to repeat `check_new`, as another process may have run in it since. ``other``: the options that
    choose another folder.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(folder / _LOCK, os.O_RDWR | os.O_CREAT) as lock, _opened(folder, os.O_RDONLY) as directory:
        _lock(lock, folder, other)
        _claims[folder.absolute()] = directory
        try:
            if new:
                check_new(folder)
            _unshare(folder / LOG)
            yield
        finally:
            with suppress(OSError, FolderLost):  # the folder may be gone
                check_claim(folder)
                (folder / _LOCK).unlink()
            del _claims[folder.absolute()]
            for path in new_folders:
                with suppress(OSError):  # one that is not empty stays
                    path.rmdir()


def check_claim(path: Path) -> None:
    """Raise FolderLost if the folder of this process's run, at or above ``path``, has become another run's."""
    for folder, directory in _claims.items():
        if not path.absolute().is_relative_to(folder) or not (folder / RECORD).is_dir():
            continue  # one that is gone is made again, without a record
        if not os.path.samestat(os.fstat(directory), folder.stat()):
            raise FolderLost(
                f"The folder {folder} of this run was moved or removed, and another run has begun in one of this name. "
                "Resume this run from where its folder is, with ckpt=last hydra.run.dir=<folder>."
            )


def _unshare(file: Path) -> None:
    """Replace a file that is a link, or has other names as in a cache of DVC, by a copy: a run appends to it."""
    if file.is_file() and (file.is_symlink() or file.stat().st_nlink > 1):
        copy = file.with_name(f".{file.name}.tmp")
        shutil.copyfile(file, copy)
        os.replace(copy, file)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Yield the descriptor of a file or folder, whose mount may be gone when it is closed."""
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        with suppress(OSError):
            os.close(descriptor)


def _lock(lock: int, folder: Path, other: str = OTHER_FOLDER) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it with the process, also after a kill
        used = os.fstat(lock).st_nlink == 0  # its holder removed it after this process had opened it
    except OSError as error:
        used = isinstance(error, BlockingIOError)
        # Lustre and NFS mounted without locks
        if not used and error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    if used:
        raise UserError(
            f"The folder {folder} is in use: a run in it has not ended. Wait for it, or choose another folder with "
            f"{other}."
        )


def is_utf8(text: str) -> bool:
    """Return whether ``text``, from the command line or a file system, has in UTF-8 the bytes that it has there."""
    return os.fsdecode(text.encode(errors="replace")) == text


def check_writable(folder: Path, other: str = OTHER_FOLDER) -> None:
    """Raise UserError for a folder that cannot be made or written, or whose name is not in UTF-8. Leaves no file.

    The same for the folders in it to which a run writes, which may belong to another user.

    ``other``: the options that choose another folder.
    """
    existing = folder.absolute()
    if not is_utf8(str(existing)):
        raise UserError(
            f"The run's folder {ascii(str(existing))[1:-1]} is invalid: its name must be in UTF-8, which torch and "
            f"TensorBoard write. Set PYTHONUTF8=1, or choose another with {other}."
        )
    while not existing.exists() and not existing.is_symlink():
        existing = existing.parent
    for place in (existing, *(folder / name for name in _WRITTEN if (folder / name).is_dir())):
        try:
            # Writing is the only reliable test: permission bits say nothing about read-only mounts, or to root.
            with tempfile.TemporaryDirectory(dir=place, prefix=".solrl-"):
                pass
        except OSError as error:
            raise UserError(
                f"The run's folder {folder} cannot be written: {os.strerror(error.errno or 0)} at {place}. "
                f"Make it writable, or choose another with {other}."
            ) from error


def remove_unused(folder: Path) -> None:
    """Delete a run folder that contains only .hydra/ and the log, so that the command can be given again."""
    if {entry.name for entry in folder.iterdir()} <= {RECORD.name, LOG, _LOCK}:
        shutil.rmtree(folder)


# The training runs that a user has started on this machine, wherever their folders lie


def _record() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "solrl_lightning" / "runs.jsonl"


def remember(folder: Path) -> None:
    """Add the run in ``folder``, with the working directory; a record that cannot be written is a warning."""
    line = json.dumps({"folder": str(folder.resolve()), "cwd": str(Path.cwd())})
    try:
        _record().parent.mkdir(parents=True, exist_ok=True)
        with _record().open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    except (OSError, RuntimeError) as error:  # RuntimeError for a user without a home
        option = path_option("hydra.run.dir", folder)
        log.warning("no record of runs can be written (%s): ckpt=last finds this run with %s", error, option)


def started_runs() -> list[tuple[Path, Path]]:
    """Return the folder of every run in the record and the working directory where it was started."""
    runs = []
    with suppress(OSError, RuntimeError):
        for line in _record().read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):  # cut by a full disk
                run = json.loads(line)
                runs.append((Path(run["folder"]), Path(run["cwd"])))
    return runs
