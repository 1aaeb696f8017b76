"""Reads the prompt sets for training and evaluation, and assigns prompts to iterations.

A set holds every prompt once, without regard to metadata, case, spacing and Unicode's two ways to write an accent
(NFC).
"""

import hashlib
import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from solrl_lightning.data.input_images import load_square, with_image
from solrl_lightning.data.prompt import INPUT_IMAGE, Prompt
from solrl_lightning.data.sources import read_records
from solrl_lightning.errors import UserError
from solrl_lightning.seeds import permutation

logger = logging.getLogger(__name__)

_BLANK = ("Zs", "Zl", "Zp", "Cc", "Cf")  # categories of Unicode


class PromptSets(NamedTuple):
    """Prompts for training and for evaluation. No prompt is in both."""

    train: list[Prompt]
    eval: list[Prompt]
    notes: list[str]  # numbers of the prompts that were dropped, for the log


def read_prompts(source: str | Path, column: str = "prompt", with_images: bool = False) -> list[Prompt]:
    """Return the unique prompts of a source, stripped, in order, without blank ones. Logs the number of repetitions.

    Raises:
        UserError: the source cannot be read, or has no prompt.
    """
    prompts, notes = _unique_prompts(str(source), column, with_images, Path.cwd())
    for note in notes:
        logger.info("%s", note)
    return list(prompts)


def digest(*values: Any) -> str:
    """Return 16 hexadecimal digits of SHA-256 of the values as JSON."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def read_prompt_sets(
    train: str | Path | None, held_out: str | Path | None, column: str = "prompt", with_images: bool = False
) -> PromptSets:
    """Return both sets. A source of None gives an empty set. Prompts of ``held_out`` are removed from the training set.

    Does not log: called several times at start-up, before logging is configured. The caller logs ``notes``.

    Raises:
        UserError: a source or an image cannot be read, or every training prompt is held out.
    """
    (prompts, notes), (eval_prompts, eval_notes) = (
        ((), ()) if source is None else _unique_prompts(str(source), column, with_images, Path.cwd())
        for source in (train, held_out)
    )
    texts = {_normalised(prompt.text) for prompt in eval_prompts}
    excluded = {(_normalised(prompt.text), prompt.image_digest) for prompt in eval_prompts}
    disjoint = [
        prompt
        for prompt in prompts  # an image is read only if its text is held out
        if (text := _normalised(prompt.text)) not in texts or (text, prompt.image_digest) not in excluded
    ]
    if prompts and not disjoint:
        raise UserError(
            f"data.train={train} is invalid: it has no prompt that data.eval={held_out} lacks, and "
            "held-out prompts are not trained on. Set data.train or data.eval to another source."
        )
    shared = len(prompts) - len(disjoint)
    overlap = [f"{train}: dropped {shared} of {len(prompts)} prompts that are held out in {held_out}"] if shared else []
    return PromptSets(disjoint, list(eval_prompts), [*notes, *eval_notes, *overlap])


@cache
def _unique_prompts(source: str, column: str, with_images: bool, cwd: Path) -> tuple[Sequence[Prompt], Sequence[str]]:
    """Return the unique rows of a source, relative to ``cwd``, and notes about the dropped rows; reads it once."""
    # Blanks, control characters, and others without width (U+200B) are no text.
    read = read_records(source, column)
    rows = [row for row in read if any(unicodedata.category(character) not in _BLANK for character in row.text)]
    notes: list[str] = []
    if with_images:
        rows = [with_image(row, source) for row in rows]
    elif any(INPUT_IMAGE in row.metadata for row in rows):  # which rewards would take for an image that was edited
        rows = [replace(row, metadata={k: v for k, v in row.metadata.items() if k != INPUT_IMAGE}) for row in rows]
        notes = [f"{source}: left out {INPUT_IMAGE}, as the model edits no image"]
    # Preference tables such as Pick-a-Pic repeat a prompt many times: count equal texts before normalising them.
    times = Counter(row.identity for row in rows)
    first = {row.identity: row for row in reversed(rows)}  # the first of equal rows wins
    unique: dict[tuple[str, str | None], Prompt] = {}
    for identity in times:
        row = first[identity]
        unique.setdefault((_normalised(row.text), row.image), replace(row, text=row.text.strip()))
    if not unique:
        raise UserError(
            f"the prompt source {source} is invalid: it must have at least one line with text, and has none. Write one "
            "prompt a line."
        )
    repeated = len(rows) - len(unique)
    others = {_normalised(row.identity) for row in rows if row.metadata != first[row.identity].metadata}
    of_others = f"; the first metadata of {len(others)} that have several are kept" if others else ""
    if repeated:
        notes.append(f"{source}: dropped {repeated} repeated prompts of {len(rows)}{of_others}")
    return tuple(unique.values()), tuple(notes)


def forget_files() -> None:
    """Let the next command of this process read its prompts and their images anew."""
    _unique_prompts.cache_clear()
    load_square.cache_clear()


def _normalised(text: str) -> str:
    return unicodedata.normalize("NFC", " ".join(text.split()).casefold())


class PromptSchedule:
    """The P training prompts of every iteration: a pure function of (seed, iteration).

    A permutation of the unique ``prompts`` is cut into slices of P. Each pass over the set uses another permutation,
    and skips the prompts that do not fill a slice, so the prompts of an iteration are always unique.

    Raises:
        UserError: there are fewer prompts than an iteration needs.
    """

    def __init__(self, prompts: Sequence[Prompt], per_iteration: int, seed: int) -> None:
        if not 1 <= per_iteration <= len(prompts):
            raise UserError(
                f"prompts_per_iteration={per_iteration} is invalid: it must be at least 1 and at most the number of "
                f"different prompts in data.train that are not in data.eval, {len(prompts)}. Lower it, or set "
                "data.train to a larger source."
            )
        self.prompts, self.per_iteration, self.seed = list(prompts), per_iteration, seed

    def for_iteration(self, iteration: int) -> list[Prompt]:
        """Return the P prompts of an iteration, counted from 0. Rank r of w takes [r::w]."""
        number, position = divmod(iteration, len(self.prompts) // self.per_iteration)
        order = permutation(f"prompts/{self.seed}/{number}", len(self.prompts))
        return [self.prompts[i] for i in order[position * self.per_iteration :][: self.per_iteration]]
