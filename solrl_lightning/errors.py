"""The errors that a user of the application meets."""

import difflib
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """A mistake in what the user asked for; the message states the rule, the value found and the way out."""


class NonFiniteError(RuntimeError):
    """A reward or a loss is not finite; the message names the prompt, and the seed where there is one.

    Args:
        row: which sample of the batch.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row

    def __reduce__(self) -> tuple[type["NonFiniteError"], tuple[str, int]]:
        return type(self), (str(self), self.row)  # pickle passes on what Exception got: the message alone


class WriteError(RuntimeError):
    """A file could not be written; the message names it. What was there before is intact."""

    @classmethod
    def of(cls, path: object, error: Exception) -> "WriteError":
        return cls(f"{path} could not be written: {getattr(error, 'strerror', None) or error}.")


class CheckFailed(RuntimeError):
    """A task that checks something is done and found faults, which its report holds; the message counts them."""


def sentence(error: Exception) -> str:
    """The first line of an error's text, as a sentence."""
    text = str(error).strip() or type(error).__name__
    return f"{text.splitlines()[0].rstrip('. :')}."


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Up to three of ``known``, nearest first; of a dotted key, the whole or the last part alone may be near."""

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, word, candidate).ratio()
        last = difflib.SequenceMatcher(None, word.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.9 * last) + 0.1 * whole - 0.04 * candidate.count(".")

    scored = sorted(((likeness(candidate), candidate) for candidate in dict.fromkeys(known)), reverse=True)
    return [candidate for score, candidate in scored[:3] if score > max(0.65, scored[0][0] - 0.1)]


def did_you_mean(names: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(names)}?" if names else ""
