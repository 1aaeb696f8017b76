"""Prompt embeddings on disk, so that a run over a known set of prompts never loads the text encoders.

One safetensors file per text, named by a hash of the text and of everything else that the embedding depends on. Files
are written atomically, and several processes may share a folder. A file with a wrong checksum is computed again.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from solrl_lightning.errors import WriteError
from solrl_lightning.policies.conditioning import Row
from solrl_lightning.policies.tensor_digest import digest

log = logging.getLogger(__name__)


class EmbeddingCache:
    """Embeddings of texts by the encoders, tokenizers and settings of ``identity``, as files of ``folder``."""

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder, self.identity = folder, identity

    def path(self, text: str) -> Path:
        name = hashlib.sha256(json.dumps([self.identity, text]).encode()).hexdigest()[:40]
        return self.folder / f"{name}.safetensors"

    def load(self, text: str) -> Row | None:
        """Return the text's embedding on the CPU, or None if it is absent, damaged or not readable."""
        path = self.path(text)
        if not path.is_file():
            return None
        with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
            row = {name: file.get_tensor(name) for name in file.keys()}  # file is no dict
            if (file.metadata() or {}).get("digest") == digest(row):
                return row
        log.warning("%s is damaged or not readable; the prompt is embedded again", path)
        return None

    def save(self, text: str, row: Row) -> None:
        row = {name: value.cpu().contiguous() for name, value in row.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Other processes may write the same text.
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".") as folder:
                file = Path(folder) / "embedding"
                file.write_bytes(save(row, metadata={"digest": digest(row)}))
                os.replace(file, self.path(text))
        except OSError as error:
            raise WriteError.of(self.path(text), error) from error


def encoder_fingerprint(folder: Path, components: Sequence[str], settings: dict[str, object]) -> str:
    """Return an identity of the encoders of a pipeline folder; other files or settings give another one.

    A hub snapshot is named by its repository and commit, a local folder by its path and its files' sizes and times.
    """
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        source: list[object] = [repository, folder.name]
    else:
        files = sorted(file for name in components for file in (folder / name).rglob("[!.]*") if file.is_file())
        stats = [(str(file.relative_to(folder)), file.stat()) for file in files]
        source = [str(folder), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]]
    return json.dumps([source, settings], sort_keys=True)
