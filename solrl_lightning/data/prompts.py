"""Prompts: read from a text file or a named source, and dealt out to iterations.

A prompt is identified by its text, so every prompt of a set is there once (case and spacing do not tell prompts apart).
"""

import difflib
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from solrl_lightning.errors import UserError
from solrl_lightning.rollout.seeds import permutation

logger = logging.getLogger(__name__)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def _shapes_train() -> list[str]:
    from solrl_lightning.shapes.captions import train_captions

    return train_captions()


def _shapes_eval() -> list[str]:
    from solrl_lightning.shapes.captions import eval_captions

    return eval_captions()


SOURCES: dict[str, Callable[[], list[str]]] = {"shapes-train": _shapes_train, "shapes-eval": _shapes_eval}
"""Named sources; a new one is one more entry. Imports stay inside, so that a name costs nothing until it is used."""


def read_prompts(path_or_name: str | Path) -> list[str]:
    """The different prompts of a named source, or of a UTF-8 text file with one prompt a line, in their order.

    Blank lines are dropped, and so are repetitions but for case and spacing, with their number in the log.
    """
    name = str(path_or_name)
    lines = SOURCES[name]() if name in SOURCES else _read_lines(Path(path_or_name))
    different: dict[str, str] = {}
    prompts = [line.strip() for line in lines if line.strip()]
    for prompt in prompts:
        different.setdefault(" ".join(prompt.split()).casefold(), prompt)
    if not different:
        raise UserError(f"a prompt file needs at least one line with text; {name} has none")
    if len(different) < len(prompts):
        logger.info("%s: dropped %d repeated prompts of %d", name, len(prompts) - len(different), len(prompts))
    return list(different.values())


def _read_lines(path: Path) -> list[str]:
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        near = difflib.get_close_matches(str(path), SOURCES, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(
            f"prompts come from a text file or a named source; the path {path} {problem} (looked in {Path.cwd()}) "
            f"and it is not one of the named sources: {', '.join(SOURCES)}{hint}"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"the prompt file {path} cannot be read: {error.strerror}") from error
    text = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        # Only line ends end a prompt: str.splitlines would also cut at form feeds and other rare separators.
        return re.split(r"\r\n|\r|\n", text.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = len(re.findall(rb"\r\n|\r|\n", text[: error.start])) + 1
        offset = error.start + len(data) - len(text)
        raise UserError(
            f"a prompt file must be UTF-8; {path} has the byte 0x{data[offset]:02x} at offset {offset} (line {line}), "
            "which is not: save the file as UTF-8"
        ) from error


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

    def at(self, iteration: int) -> list[str]:
        """P prompts of all ranks together; rank r of w takes [r::w]."""
        if iteration < 0:
            raise ValueError(f"iterations are counted from 0; got {iteration}")
        number, position = divmod(iteration, len(self.prompts) // self.per_iteration)
        order = permutation(f"prompts/{self.seed}/{number}", len(self.prompts))
        first = position * self.per_iteration
        return [self.prompts[i] for i in order[first : first + self.per_iteration]]
