"""The answers of a judge: reward=vlm and reward=vlm_local take the same spellings as the same answer."""

import math
import re
import unicodedata
from collections.abc import Iterable
from typing import Annotated, Any

from solrl_lightning.errors import UserError
from solrl_lightning.options.rules import HERE, must_be

LEAST = 1e-3
"""Probability of all answers together; below it the first word is another one, such as <think>."""
_IN_WORDS = "._+-\u200c\u200d"  # and the joiners within words of Persian and Hindi
# Other signs of a number than "-", which normal() makes of some: hyphens, dashes, superscript and full width.
_MINUS = re.compile(r"(?<!\w)[\u2010-\u2013\u207b\u208b\u2212\ufe63\uff0d](?=\.?[\d\u00b2\u00b3\u00b9\u2070-\u2089])")


def words(text: str) -> list[str]:
    """Return the words of a text: letters with their marks, as of Hindi and Thai, digits, and the signs of numbers."""
    text = _MINUS.sub("-", text)
    in_words = (one in _IN_WORDS or unicodedata.category(one)[0] in "LMN" for one in text)
    parts = "".join(one if inside else " " for one, inside in zip(text, in_words, strict=True)).split()
    return [word.strip("_") for word in parts]  # which makes a word bold in Markdown


def normal(answer: str | int) -> str:
    """Return an answer without case, width and a final dot; a number in its shortest form, as "4" for "4.0"."""
    word = _MINUS.sub("-", unicodedata.normalize("NFKC", str(answer)).casefold().strip().rstrip("."))
    return f"{float(word):.15g}" if re.fullmatch(r"[+-]?[0-9]+\.[0-9]+", word) else word


def check_answered(
    score: float, key: str, model: str, prompt: str, answers: Iterable[str], other_fix: str = ""
) -> None:
    """Raise UserError for a judge, the reward at ``key``, whose ``score`` in a trial is NaN: it gave no answer."""
    if math.isnan(score):
        raise UserError(
            f"{key}.answers is invalid: the model {model}, asked about an image without content and the prompt "
            f"{prompt!r}, gives none of {', '.join(answers)}. Set {key}.question and {key}.answers to what it "
            f"answers{other_fix}."
        )


def spellings(answer: str) -> set[str]:
    """Return the usual spellings of an answer, whose ``normal`` is the same."""
    return {answer, answer.lower(), answer.capitalize(), answer.upper()}


def _are_answers(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(
            type(word) in (str, int)
            and [normal(one) for one in words(str(word))] == [normal(word)]
            and type(mark) in (int, float)
            and math.isfinite(mark)
            for word, mark in value.items()
        )
        and len({float(mark) for mark in value.values()}) > 1
        and len({normal(word) for word in value}) == len(value)
    )


Answers = Annotated[
    dict[str | int, float],
    must_be(
        "two or more words or whole numbers that differ not only in case, with numbers that differ",
        _are_answers,
        f"Replace it by ~{HERE} '+{HERE}={{good:1,bad:0}}'; "
        f'in a file, yes and no need quotes: {{"yes": 1, "no": 0}}.',
    ),
]
"""Value of each answer of a judge."""
