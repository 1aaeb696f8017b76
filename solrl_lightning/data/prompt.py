"""A prompt: its text, and what its row in the source has beside it. Imports no torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

INPUT_IMAGE = "input_image"
"""Key of ``Prompt.metadata`` with the path of the input image."""


@dataclass(frozen=True)
class Prompt:
    """A row of a prompt source. Prompts of equal text with other metadata or another image are not equal."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The other keys of the row, for rewards; a string under "tag" is the kind of prompt."""
    image: str | None = None
    """Name of the input image, as in the row, for a model that edits one."""

    @property
    def identity(self) -> str:
        """Return the text, with the name of the image if there is one: what seeds depend on."""
        return self.text if self.image is None else f"{self.text} [image: {self.image}]"

    @property
    def input_image(self) -> str | None:
        """Return the path of the input image."""
        return None if self.image is None else self.metadata[INPUT_IMAGE]

    @cached_property
    def image_digest(self) -> str | None:
        """Return the SHA-256 digest of the input image's file."""
        return None if self.image is None else hashlib.sha256(Path(self.metadata[INPUT_IMAGE]).read_bytes()).hexdigest()

    @property
    def content(self) -> str:
        """Return the identity with what models and rewards read beside it: equal ones have equal samples and scores."""
        read = {**self.metadata, INPUT_IMAGE: self.image_digest} if self.image else self.metadata
        return f"{self.identity} {json.dumps(read)}" if read else self.identity


def identities(prompts: Iterable[Prompt]) -> list[str]:
    """Return the identity of each prompt."""
    return [prompt.identity for prompt in prompts]


def contents(prompts: Iterable[Prompt]) -> list[str]:
    """Return the content of each prompt."""
    return [prompt.content for prompt in prompts]
