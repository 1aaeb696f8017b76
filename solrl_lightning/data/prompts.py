"""Reads the prompt sets for training and evaluation, and assigns prompts to iterations.

A prompt's identity is its text without regard to case, spacing and Unicode's two ways to write an accent (NFC). A set
holds every prompt once.
"""

import hashlib
import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from solrl_lightning.data.input_images import with_image
from solrl_lightning.data.sources import Record, read_records
from solrl_lightning.errors import UserError
from solrl_lightning.seeds import permutation

logger = logging.getLogger(__name__)

_BLANK = ("Zs", "Zl", "Zp", "Cc", "Cf")  # categories of Unicode


class PromptSets(NamedTuple):
    """Prompts for training and for evaluation. No prompt is in both."""

    train: list[str]
    eval: list[str]
    notes: list[str]  # numbers of the prompts that were dropped, for the log
    metadata: dict[str, Mapping[str, Any]]  # of the prompts that have any, which rewards read


def read_prompts(source: str | Path, column: str = "prompt", with_images: bool = False) -> list[str]:
    """Return the unique prompts of a source, stripped, in order, without blank ones. Logs the number of repetitions.

    Raises:
        UserError: the source cannot be read, or has no prompt.
    """
    records, notes = _unique_records(source, column, with_images)
    for note in notes:
        logger.info("%s", note)
    return [record.text for record in records]


def read_metadata(
    source: str | Path, column: str = "prompt", with_images: bool = False
) -> dict[str, Mapping[str, Any]]:
    """prompt -> metadata, for the prompts of ``read_prompts``."""
    return {record.text: record.metadata for record in _unique_records(source, column, with_images)[0]}


def read_tags(source: str | Path, column: str = "prompt", with_images: bool = False) -> dict[str, str]:
    """prompt -> tag, for those prompts of ``read_prompts`` that have a tag."""
    rows = read_metadata(source, column, with_images).items()
    return {prompt: tag for prompt, metadata in rows if (tag := metadata.get("tag")) is not None}


def digest(*values: Any) -> str:
    """Return 16 hexadecimal digits of SHA-256 of the values as JSON."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def read_prompt_sets(
    train: str | Path | None, held_out: str | Path | None, column: str = "prompt", with_images: bool = False
) -> PromptSets:
    """Both sets. A source of None gives an empty set. Prompts of ``held_out`` are removed from the training set.

    ``with_images``: each prompt has an input image; see ``input_images``.

    Does not log: called several times at start-up, before logging is configured. The caller logs ``notes``.

    Raises:
        UserError: a source or an image cannot be read, or every training prompt is held out.
    """
    (train_records, notes), (eval_records, eval_notes) = (
        ((), ()) if source is None else _unique_records(source, column, with_images) for source in (train, held_out)
    )
    prompts, eval_prompts = [record.text for record in train_records], [record.text for record in eval_records]
    identities = {_identity(prompt) for prompt in eval_prompts}
    disjoint = [prompt for prompt in prompts if _identity(prompt) not in identities]
    if prompts and not disjoint:
        raise UserError(
            f"data.train={train} is invalid: all of its {len(prompts)} prompts are also in data.eval={held_out}, and "
            "held-out prompts are not trained on. Set data.train or data.eval to another source."
        )
    shared = len(prompts) - len(disjoint)
    overlap = [f"{train}: dropped {shared} of {len(prompts)} prompts that are held out in {held_out}"] if shared else []
    metadata = {record.text: record.metadata for record in (*train_records, *eval_records) if record.metadata}
    return PromptSets(disjoint, eval_prompts, [*notes, *eval_notes, *overlap], metadata)


def _unique_records(source: str | Path, column: str, with_images: bool) -> tuple[Sequence[Record], Sequence[str]]:
    """Return the unique rows of a source, and notes about the dropped rows. A process reads a source once."""
    return _read(str(source), column, with_images, Path.cwd())


@cache
def _read(  # cwd: a part of the key
    source: str, column: str, with_images: bool, cwd: Path
) -> tuple[Sequence[Record], Sequence[str]]:
    rows = read_records(source, column)
    if with_images:
        rows = [Record(*with_image(row.text, row.metadata, source)) for row in rows if _has_text(row.text)]
    # Preference tables such as Pick-a-Pic repeat a prompt many times: count equal texts before normalising them.
    times = Counter(row.text for row in rows if _has_text(row.text))
    first = {row.text: row for row in reversed(rows)}  # the first of equal rows wins
    unique: dict[str, Record] = {}
    for text in times:
        unique.setdefault(_identity(text), Record(text.strip(), first[text].metadata))
    if not unique:
        raise UserError(
            f"the prompt source {source} is invalid: it must have at least one line with text, and has none. Write one "
            "prompt a line."
        )
    total = times.total()
    repeated = total - len(unique)
    others = {_identity(row.text) for row in rows if row.text in times and row.metadata != first[row.text].metadata}
    of_others = f"; the first metadata of {len(others)} that have several are kept" if others else ""
    notes = (f"{source}: dropped {repeated} repeated prompts of {total}{of_others}",) if repeated else ()
    return tuple(unique.values()), notes


def _has_text(prompt: str) -> bool:
    """Return whether a prompt has more than blanks, control characters, and others without width (U+200B)."""
    return any(unicodedata.category(character) not in _BLANK for character in prompt)


def _identity(prompt: str) -> str:
    return unicodedata.normalize("NFC", " ".join(prompt.split()).casefold())


class PromptSchedule:
    """The P training prompts of every iteration: a pure function of (seed, iteration).

    A permutation of the unique ``prompts`` is cut into slices of P. Each pass over the set uses another permutation,
    and skips the prompts that do not fill a slice, so the prompts of an iteration are always unique.

    Args:
        prompts: of the training set.
        per_iteration: P.
        seed: of the permutations.

    Raises:
        UserError: there are fewer prompts than an iteration needs.
    """

    def __init__(self, prompts: Sequence[str], per_iteration: int, seed: int) -> None:
        if not 1 <= per_iteration <= len(prompts):
            raise UserError(
                f"prompts_per_iteration={per_iteration} is invalid: it must be at least 1 and at most the number of "
                f"different prompts in data.train that are not in data.eval, {len(prompts)}. Lower it, or set "
                "data.train to a larger source."
            )
        self.prompts, self.per_iteration, self.seed = list(prompts), per_iteration, seed

    def for_iteration(self, iteration: int) -> list[str]:
        """Return the P prompts of an iteration, counted from 0. Rank r of w takes [r::w]."""
        number, position = divmod(iteration, len(self.prompts) // self.per_iteration)
        order = permutation(f"prompts/{self.seed}/{number}", len(self.prompts))
        return [self.prompts[i] for i in order[position * self.per_iteration :][: self.per_iteration]]
