"""Identities of tensors and of files of weights: of embeddings whole, of large models by samples."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, uint8

SAMPLES = 4096
_BLOCKS, _BLOCK_BYTES = 256, 4096
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


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
    """Return a digest of each file of weights that is in one of the folders ``paths``, or is one, by key and name.

    Of its size and 256 to 512 blocks, at equal steps. A path where there is nothing has none.
    """
    digests = {}
    for key, path in paths.items():
        for file in [path] if path.is_file() else path.glob("*"):
            if file.suffix in _WEIGHTS:
                size = file.stat().st_size
                content = hashlib.blake2b(str(size).encode(), digest_size=16)
                with open(file, "rb") as opened:
                    for start in range(0, size, max(_BLOCK_BYTES, size // _BLOCKS)):
                        opened.seek(start)
                        content.update(opened.read(_BLOCK_BYTES))
                digests[f"{key}/{file.name}"] = content.hexdigest()
    return digests
