"""Prompts: read from their sources, kept apart for training and evaluation, and dealt out to iterations.

A prompt is identified by its text, so every prompt of a set is there once; case and spacing do not tell prompts apart.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from solrl_lightning.data.sources import Record, read_records
from solrl_lightning.errors import UserError
from solrl_lightning.seeds import permutation

logger = logging.getLogger(__name__)


class PromptSets(NamedTuple):
    """What is trained on and what is evaluated: no prompt is in both."""

    train: list[str]
    eval: list[str]
    notes: list[str]  # what was left out of them, for the log


def read_prompts(source: str | Path, column: str = "prompt") -> list[str]:
    """The different prompts of a source (see ``sources.read_records``), in their order.

    Blank ones are dropped, and so are repetitions but for case and spacing, with their number in the log.
    """
    records, notes = _different(source, column)
    for note in notes:
        logger.info("%s", note)
    return [record.text for record in records]


def read_tags(source: str | Path, column: str = "prompt") -> dict[str, str]:
    """The kind of every prompt that `read_prompts` gives, as far as the source tells kinds apart."""
    return {record.text: record.tag for record in _different(source, column)[0] if record.tag is not None}


def read_prompt_sets(train: str | Path | None, held_out: str | Path | None, column: str = "prompt") -> PromptSets:
    """Both sets; that of no source is empty. What is held out for evaluation is taken out of what is trained on.

    Logs nothing: a start asks for them several times, before it has a log, too.

    Raises:
        UserError: a source cannot be read, or nothing is left to train on.
    """
    (given, notes), (evaluated, more) = (
        ((), ()) if source is None else _different(source, column) for source in (train, held_out)
    )
    prompts, kept_out = ([record.text for record in records] for records in (given, evaluated))
    identities = {_identity(prompt) for prompt in kept_out}
    left = [prompt for prompt in prompts if _identity(prompt) not in identities]
    if prompts and not left:
        raise UserError(
            f"training needs prompts that are not evaluated on; all {len(prompts)} of data.train={train} are in "
            f"data.eval={held_out} too. Name another source for one of them."
        )
    taken = len(prompts) - len(left)
    overlap = [f"{train}: left out {taken} of {len(prompts)} prompts that {held_out} evaluates on"] if taken else []
    return PromptSets(left, kept_out, [*notes, *more, *overlap])


def _different(source: str | Path, column: str) -> tuple[Sequence[Record], Sequence[str]]:
    """The different rows of a source, which a process reads once, and what to say of the others."""
    return _read(str(source), column, Path.cwd())


@cache
def _read(source: str, column: str, cwd: Path) -> tuple[Sequence[Record], Sequence[str]]:  # cwd: of relative paths
    rows = read_records(source, column)
    # Tables of preferences repeat a prompt many times to the letter; that is cheap to find.
    times = Counter(row.text for row in rows)
    tags = {row.text: row.tag for row in reversed(rows)}  # of the first of equal rows
    different: dict[str, Record] = {}
    for text in times:
        if text.strip():
            different.setdefault(_identity(text), Record(text.strip(), tags[text]))
    if not different:
        raise UserError(f"a prompt source needs at least one line with text; {source} has none")
    total = sum(count for text, count in times.items() if text.strip())
    repeated = total - len(different)
    notes = (f"{source}: dropped {repeated} repeated prompts of {total}",) if repeated else ()
    return tuple(different.values()), notes


def _identity(prompt: str) -> str:
    return " ".join(prompt.split()).casefold()


class PromptSchedule:
    """Which P prompts an iteration trains on: a pure function of (seed, iteration).

    The set is walked in passes. Each pass is a permutation of its own, cut into iterations; what is left over at its
    end waits for another pass, so the prompts of an iteration are always different.
    """

    def __init__(self, prompts: Sequence[str], per_iteration: int, seed: int) -> None:
        if not 1 <= per_iteration <= len(prompts):
            raise UserError(
                f"prompts_per_iteration must lie between 1 and the number of different training prompts, "
                f"{len(prompts)}; got {per_iteration}"
            )
        self.prompts = list(prompts)
        self.per_iteration = per_iteration
        self.seed = seed

    def for_iteration(self, iteration: int) -> list[str]:
        """P prompts of all ranks together; rank r of w takes [r::w]."""
        if iteration < 0:
            raise ValueError(f"iterations are counted from 0; got {iteration}")
        number, position = divmod(iteration, len(self.prompts) // self.per_iteration)
        order = permutation(f"prompts/{self.seed}/{number}", len(self.prompts))
        first = position * self.per_iteration
        return [self.prompts[i] for i in order[first : first + self.per_iteration]]
