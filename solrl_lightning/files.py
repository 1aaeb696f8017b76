"""Files that appear whole or not at all: each is written beside its place and moved there once it is on the disk."""

import io
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors import SafetensorError

from solrl_lightning.errors import UserError, WriteError


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Readers see the old file or the new one, never a part of it, also after a crash.

    Raises:
        WriteError: the disk does not take it; the old file is intact.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):  # the folder may be what is missing
            temporary.unlink()
        raise WriteError.of(path, error) from error


def finite_only(value: Any) -> Any:
    """``value`` with null for NaN and infinities, which JSON cannot represent."""
    if isinstance(value, Mapping):
        return {str(key): finite_only(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_only(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder`` to write into; what is in it on leaving replaces the files of ``folder``.

    Raises:
        WriteError: the disk does not take it; ``folder`` is as it was.
    """
    part = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        part.mkdir(parents=True)
        yield part
        files = [file for file in part.rglob("*") if file.is_file()]
        for file in files:
            file.chmod(part.stat().st_mode & 0o666)  # safetensors creates files that only their owner can read
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        if not folder.exists():
            os.replace(part, folder)
        else:
            for file in files:
                target = folder / file.relative_to(part)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
    except (OSError, SafetensorError) as error:  # safetensors raises its own for a full disk
        raise WriteError.of(folder, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


_PARTS = {"global_step": int, "state_dict": dict, "callbacks": dict, "loops": dict, "optimizer_states": list}


def read_checkpoint(file: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The checkpoint of a training run.

    Raises:
        UserError: it holds something else.
    """
    own = "Name one that this program wrote: checkpoints/*.ckpt in a run's folder."
    try:
        checkpoint = torch.load(file, map_location=device, weights_only=True, mmap=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"ckpt={file} is invalid: it is not made of tensors and numbers ({reason}). {own}") from error
    found = checkpoint if isinstance(checkpoint, dict) else {}
    wrong = [name for name, kind in _PARTS.items() if not isinstance(found.get(name), kind)]
    if wrong:
        raise UserError(
            f"ckpt={file} is invalid: the checkpoint of a training run holds {', '.join(_PARTS)}; in this one "
            f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} missing or of another kind. {own}"
        )
    return found


def iterations_done(checkpoint: dict[str, Any]) -> int:
    """The iteration that a checkpoint was written after; without a count of its own, each was one optimiser step."""
    loop = checkpoint["loops"].get("fit_loop", {}).get("state_dict", {})
    return loop.get("iterations_done", checkpoint["global_step"])


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints with `write_atomically`.

    Lightning's own writes to the system's temporary folder, which need not have the room, and moves the file from
    there, which between file systems is a copy into place.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_atomically(Path(path), buffer.getbuffer())
