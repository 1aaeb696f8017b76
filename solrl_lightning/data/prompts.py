"""Prompts: unique texts of a source, disjoint sets for training and evaluation, and the prompts of an iteration.

Two prompts are the same if their texts are equal except for case and spacing.
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
    """Training and evaluation prompts; no prompt is in both."""

    train: list[str]
    eval: list[str]
    notes: list[str]  # on prompts that were left out, for the log


def read_prompts(source: str | Path, column: str = "prompt") -> list[str]:
    """The unique prompts of a source (see ``sources.read_records``), in order.

    Drops blank and repeated prompts and logs the number of repeated ones.
    """
    records, notes = _different(source, column)
    for note in notes:
        logger.info("%s", note)
    return [record.text for record in records]


def read_tags(source: str | Path, column: str = "prompt") -> dict[str, str]:
    """The kind of every prompt of `read_prompts` that has one."""
    return {record.text: record.tag for record in _different(source, column)[0] if record.tag is not None}


def read_prompt_sets(train: str | Path | None, held_out: str | Path | None, column: str = "prompt") -> PromptSets:
    """Both sets; without a source a set is empty. Evaluation prompts are removed from the training prompts.

    Does not log: called several times at start-up, before logging is configured.

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
    """The unique rows of a source, which a process reads once, and notes on the dropped ones."""
    return _read(str(source), column, Path.cwd())


@cache
def _read(source: str, column: str, cwd: Path) -> tuple[Sequence[Record], Sequence[str]]:  # cwd: of relative paths
    rows = read_records(source, column)
    # Counter first: preference tables repeat a prompt many times verbatim.
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
    """The P prompts of each iteration: a pure function of (seed, iteration).

    Each pass over the set is another permutation, cut into iterations. A pass leaves out its remainder, so the prompts
    of an iteration are unique.
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

    def at(self, iteration: int) -> list[str]:
        """P prompts of all ranks together; rank r of w takes [r::w]."""
        if iteration < 0:
            raise ValueError(f"iterations are counted from 0; got {iteration}")
        number, position = divmod(iteration, len(self.prompts) // self.per_iteration)
        order = permutation(f"prompts/{self.seed}/{number}", len(self.prompts))
        first = position * self.per_iteration
        return [self.prompts[i] for i in order[first : first + self.per_iteration]]
