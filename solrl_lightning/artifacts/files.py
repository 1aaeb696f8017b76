"""Atomic writes of files and folders, and reading of checkpoints and published weights."""

import io
import logging
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO
from zipfile import is_zipfile

import numpy as np
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from solrl_lightning.artifacts.complete import reading
from solrl_lightning.artifacts.hub import fetch
from solrl_lightning.artifacts.run_folder import check_claim
from solrl_lightning.errors import UserError, WriteError

log = logging.getLogger(__name__)

CHECKPOINT_BYTES = 20
"""Of a trained weight: in float32 the weight, the old policy's, the average, and two moments of AdamW."""


_OF_DDP = "module."


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write ``content`` into ``path``, as with `opened_atomically`."""
    with opened_atomically(path) as file:
        file.write(content)


@contextmanager
def opened_atomically(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces ``path`` on exit, or is removed; ``path`` has its old or its new content.

    Raises:
        WriteError: writing fails, for example on a full disk; the old file is intact.
    """
    check_claim(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise WriteError.of(path, error) from error
    finally:
        with suppress(OSError):  # replaced, or the folder may not exist
            temporary.unlink()


def finite_only(value: Any) -> Any:
    """Return ``value`` with null for NaN and infinities, which JSON cannot represent."""
    if isinstance(value, Mapping):
        return {str(key): finite_only(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_only(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved into ``folder`` on exit.

    Raises:
        WriteError: writing fails, for example on a full disk; ``folder`` is unchanged.
    """
    check_claim(folder)
    part = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed process
    try:
        part.mkdir(parents=True)
        yield part
        files = [file for file in part.rglob("*") if file.is_file()]
        for file in files:
            with suppress(PermissionError):  # of a mount without modes, such as CIFS or /mnt/c of WSL
                file.chmod(part.stat().st_mode & 0o666)  # safetensors creates files with mode 600
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        if not folder.exists():
            with suppress(OSError):  # a bucket that is mounted, as by gcsfuse, renames no folder with files in it
                os.replace(part, folder)
        for file in files if part.exists() else ():
            target = folder / file.relative_to(part)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)
    except (OSError, SafetensorError) as error:  # safetensors raises SafetensorError for a full disk
        raise WriteError.of(folder, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def load_tensors(key: str, name: str, *files: str, kind: str, hint: str) -> dict[str, Tensor]:
    """Return the tensors by name of a file of safetensors, or of torch.save, maybe under the key ``state_dict``.

    The prefix of a model that DistributedDataParallel has wrapped is removed.

    ``name`` is a file, or a folder or hub id with one of ``files``; ``key``, ``kind`` and ``hint`` as in ``fetch``.
    UserError if the file does not exist, is damaged, holds code, or holds something else than tensors, values that are
    not finite, or weights of integers.
    """
    file = Path(name).expanduser()
    if not file.is_file():
        file = fetch(name, *files, key=key, kind=kind, hint=hint)
    again = "Download or save it again, whole, or save its tensors alone by safetensors.torch.save_file."
    with reading(f"the file {file} of {key}={name} is invalid: it cannot be read as weights", fix=again):
        if file.suffix == ".safetensors":
            content: Any = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    weights = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        actual = f"keys {', '.join(map(str, content))[:200]}" if isinstance(content, dict) else type(content).__name__
    else:
        actual = next(
            (f"{tensor} of {wrong}" for tensor, value in weights.items() if (wrong := _unfit(tensor, value))), ""
        )
    if actual:
        raise UserError(
            f"{key}={name} is invalid: {file} must hold finite tensors by name or under the key state_dict; "
            f"found: {actual}. Set {key} to the published weights. {hint}"
        )
    in_ddp = all(name.startswith(_OF_DDP) for name in weights)
    return {name.removeprefix(_OF_DDP): value for name, value in weights.items()} if in_ddp else weights


def _unfit(name: str, value: Tensor) -> str:
    """Return what is wrong with the values of a tensor: a weight of integers is quantised; empty if nothing is."""
    if value.is_floating_point():
        return "" if value.float().isfinite().all() else "values that are not finite"
    return str(value.dtype) if name.endswith((".weight", ".bias")) else ""


def check_state_dict(
    key: str, name: str, state: Mapping[str, Tensor], weights: Mapping[str, Tensor], unfit: str, fix: str
) -> None:
    """Raise ``UserError`` unless ``weights``, of ``key=name``, have the names and shapes of a model's ``state``."""
    check_state_dict_keys(key, name, state.keys() - weights.keys(), weights.keys() - state.keys())
    misfits = [tensor for tensor in state if state[tensor].shape != weights[tensor].shape]
    if misfits:
        first = misfits[0]
        raise UserError(
            f"{key}={name} is invalid: {unfit}: {len(misfits)} tensors have another shape, such as {first} with "
            f"{list(weights[first].shape)} for {list(state[first].shape)}. {fix}"
        )


def check_state_dict_keys(key: str, name: str, missing: Any, unexpected: Any) -> None:
    """Raise ``UserError`` if there are missing or unexpected names."""
    for what, names in (("lacks", missing), ("has unexpectedly", unexpected)):
        if names:
            raise UserError(
                f"{key}={name} is invalid: it {what} {len(names)} tensors, such as {min(names)}, so these are not the "
                f"weights of this model. Set {key} to the published weights."
            )


_PARTS = {"global_step": int, "state_dict": dict, "callbacks": dict, "loops": dict, "optimizer_states": list}


def read_checkpoint(file: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the checkpoint of a training run.

    Raises:
        UserError: the file is no checkpoint of a training run, or has no valid number of iterations.
    """
    hint = "Use a checkpoint of a training run: ckpt=<run folder>/checkpoints/last.ckpt."
    try:
        checkpoint = torch.load(file, map_location=device, weights_only=True, mmap=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"ckpt={file} is invalid: it is not made of tensors and numbers ({reason}). {hint}") from error
    parts = checkpoint if isinstance(checkpoint, dict) else {}
    wrong = [name for name, kind in _PARTS.items() if not isinstance(parts.get(name), kind)]
    loop = {} if wrong else parts["loops"].get("fit_loop", {})
    if not isinstance(loop, dict) or not isinstance(loop.get("state_dict", {}), dict):
        wrong = ["the state of the loop"]
    elif not wrong and (type(done := iterations_done(parts)) is not int or done < 0):
        between = f", {done:g}, as it was saved between two steps of one," if isinstance(done, float) else ""
        wrong = [f"the number of iterations{between}"]
    if wrong:
        raise UserError(
            f"ckpt={file} is invalid: the checkpoint of a training run has {', '.join(_PARTS)}; in this one "
            f"{' and '.join(wrong)} cannot be used. {hint}"
        )
    return parts


def loop_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return what ``ExploreTrainLoop`` has saved; empty in a checkpoint of another loop."""
    return checkpoint["loops"].get("fit_loop", {}).get("state_dict", {})


def iterations_done(checkpoint: dict[str, Any]) -> int:
    """Return the iterations finished before the checkpoint; one without this count took one step per iteration."""
    return loop_state(checkpoint).get("iterations_done", checkpoint["global_step"])


def has_ended(checkpoint: dict[str, Any], iterations: int) -> bool:
    """Return whether a run of this length trains no further: it has done its iterations, or a callback has ended it."""
    return iterations_done(checkpoint) >= iterations or loop_state(checkpoint).get("stopped", False)


class _Unreadable(Exception):
    """A value that ``torch.load(weights_only=True)`` refuses."""


def _readable(value: Any, place: str) -> Any:
    """Return ``value`` with Python's numbers and strings, and tensors, for numpy's; itself if it has none.

    Raises:
        _Unreadable: ``torch.load(weights_only=True)`` refuses it, or it cannot be pickled.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) in (dict, OrderedDict):
        keys = [_readable(key, f"{place}[{key!r}]") for key in value]
        values = [_readable(each, f"{place}[{key!r}]") for key, each in value.items()]
        same = all(new is old for new, old in zip([*keys, *values], [*value, *value.values()], strict=True))
        return value if same else type(value)(zip(keys, values, strict=True))
    if type(value) in (list, tuple):
        items = [_readable(each, f"{place}[{index}]") for index, each in enumerate(value)]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
    if isinstance(value, np.generic) and value.dtype.kind in "biufU" and type(value.item()) in _PLAIN:
        return value.item()
    try:
        if type(value) is np.ndarray:
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        torch.save(value, file := io.BytesIO())
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # of pickle, of torch, or of the code of the value's class
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise _Unreadable(f"torch.load(weights_only=True) refuses {place}, a {kind}") from error
    return value


_PLAIN = (type(None), bool, int, float, str, Tensor, torch.nn.Parameter)
_OWN = {*_PARTS, "lr_schedulers"}  # what a run cannot resume without
_FIX = "Save tensors, arrays, numbers and strings, or lists and dicts of them."


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints with `write_atomically`, of what `read_checkpoint` reads only.

    Lightning writes to the system's temporary folder, which may be too small, and then moves the file, which is not
    atomic between file systems. It saves any object in the state of a callback, but such a file cannot be read safely.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()  # what stays out, of which a warning has been printed

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        checkpoint = self._without_unreadable(checkpoint)
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with opened_atomically(Path(path)) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # closing the archive fails after writing to it has failed, or Ctrl-C
                first = error.__context__
                raise first if isinstance(first, OSError | KeyboardInterrupt) else error from None

    def _without_unreadable(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint without the states of callbacks, and what hooks have added, that cannot be read.

        Raises:
            UserError: what the run cannot resume without, as the state of its optimiser, cannot be read.
        """
        kept: dict[str, Any] = {}
        for key, value in checkpoint.items():
            if key == "callbacks":
                kept[key] = self._readable_states(value, "the state of the callback ")
            elif key in _OWN:
                try:
                    kept[key] = _readable(value, key)
                except _Unreadable as error:
                    raise UserError(f"the checkpoint is invalid: {error}. {_FIX}") from error
            else:
                kept |= self._readable_states({key: value}, "")
        return kept

    def _readable_states(self, states: Mapping[str, Any], whose: str) -> dict[str, Any]:
        kept = {}
        for key, state in states.items():
            try:
                kept[key] = _readable(state, "state")
            except _Unreadable as error:
                if key not in self._told:
                    log.warning("%s%s stays out of the checkpoints: %s. %s", whose, key, error, _FIX)
                self._told.add(key)
        return kept
