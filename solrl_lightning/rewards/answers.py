"""The answers of a judge: reward=vlm and reward=vlm_local take the same spellings as the same answer."""

import re
import unicodedata


def normal(answer: str) -> str:
    """Return an answer without case, width and a final dot; a number in its shortest form, as "4" for "4.0"."""
    word = unicodedata.normalize("NFKC", answer).casefold().strip().rstrip(".")
    return f"{float(word):.15g}" if re.fullmatch(r"[+-]?[0-9]+\.[0-9]+", word) else word


def spellings(answer: str) -> set[str]:
    """Return the usual spellings of an answer, whose ``normal`` is the same."""
    return {answer, answer.lower(), answer.capitalize(), answer.upper()}
