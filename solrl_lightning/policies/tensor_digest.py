"""Identities of tensors and of the files of models: of embeddings and settings whole, of weights by samples."""

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, uint8

SAMPLES = 4096
_BLOCKS, _BLOCK_BYTES = 256, 4096
_OF_LIBRARIES = "_diffusers_version transformers_version _name_or_path _commit_hash is_local local_files_only".split()
_IRRELEVANT = re.compile(r"\.|.*(\.md|\.index\.json)$|LICENSE", re.IGNORECASE)


def digest(tensors: Mapping[str, Tensor], before: str = "", samples: int = sys.maxsize) -> str:
    """Return a digest of names, dtypes, shapes and ``samples`` to twice as many elements of a tensor, at equal steps.

    Training, scaling or another LoRA changes nearly all elements of a tensor.

    Args:
        before: a digest that the result continues.
    """
    content = hashlib.blake2b(before.encode(), digest_size=16)
    for name, value in sorted(tensors.items()):
        content.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        step = max(1, value.numel() // samples)
        content.update(value.detach().flatten()[::step].cpu().contiguous().view(uint8).numpy().tobytes())
    return content.hexdigest()


def file_digests(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return a digest of each file that is in one of the folders ``paths``, or is one, by key and name.

    Of JSON: of its keys, without those that libraries add in saving. Of others: of the size and, above 1 MiB, of 256 to
    512 blocks at equal steps. Hidden files, pages and indices of weights have none, and neither has a path where there
    is nothing.
    """
    digests = {}
    for key, path in paths.items():
        for file in path.glob("*") if path.is_dir() else [path]:
            if file.is_file() and not _IRRELEVANT.match(file.name):
                digests[f"{key}/{file.name}"] = hashlib.blake2b(_content(file), digest_size=16).hexdigest()
    return digests


def _content(file: Path) -> bytes:
    if file.suffix == ".json":
        with suppress(ValueError):  # a file that is no JSON is compared by its bytes
            return json.dumps(json.loads(file.read_bytes(), object_hook=_settings), sort_keys=True).encode()
    size = file.stat().st_size
    blocks = [str(size).encode()]
    with open(file, "rb") as opened:
        for start in range(0, size, max(_BLOCK_BYTES, size // _BLOCKS)):
            opened.seek(start)
            blocks.append(opened.read(_BLOCK_BYTES))
    return b"".join(blocks)


def _settings(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in _OF_LIBRARIES}
