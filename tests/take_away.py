"""Each file of a folder taken away or damaged: an error of one line that names it, or equal outputs."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from solrl_lightning.errors import UserError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"

DEEP = b"[" * 200_000


def take_each_file_away(folder: Path, outputs_of: Callable[[], Sequence[Tensor]], leave: str = "") -> dict[str, bool]:
    """Return whether each file of ``folder``, but those that end with ``leave``, is needed, by its path there."""
    whole, needed = outputs_of(), {}
    files = (file for file in folder.rglob("*") if file.is_file() and not (leave and file.name.endswith(leave)))
    for file in sorted(files):
        name, aside = str(file.relative_to(folder)), folder.with_name(f"{folder.name}.aside")
        file.rename(aside)
        objects, weights = [DEEP, b"[]", b"\xef\xbb\xbf{}"], [b"", b"no weights" * 100, aside.read_bytes()[:-9]]
        damaged = {
            ".json": objects,
            ".jinja": [b"", b"<!DOCTYPE html>"],
            ".safetensors": weights,
            ".pt": weights,
            ".pth": weights,
        }
        for content in (None, POINTER, *damaged.get(file.suffix, [])):
            if content is not None:
                file.write_bytes(content)
            try:
                outputs = outputs_of()
                assert all(torch.equal(*pair) for pair in zip(whole, outputs, strict=True)), f"{name}: {content!r}"
                needed.setdefault(name, False)
            except UserError as error:
                text = str(error)
                assert file.name in text and "\n" not in text, f"{name}: {content!r}: {text}"
                needed.setdefault(name, True)
        aside.rename(file)
    return needed
