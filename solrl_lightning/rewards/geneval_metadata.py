"""The layout of GenEval's metadata. Imports no torch: prompts are checked with it before a reward is loaded."""

from collections.abc import Mapping, Sequence
from typing import Any

from solrl_lightning.errors import UserError

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
MAX_OBJECTS = 16  # of a class
_KEYS = ("class", "count", "color", "position")  # of a clause


def check_metadata(prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``UserError`` for a prompt whose metadata are not GenEval's."""
    for prompt, row in zip(prompts, metadata, strict=True):
        if broken := broken_rule(row):
            raise UserError(
                f"the metadata of the prompt {prompt!r} are invalid: reward=geneval needs GenEval's, and {broken}. "
                "Set data=geneval, or data.train and data.eval to .jsonl files with such metadata."
            )


def broken_rule(metadata: Mapping[str, Any]) -> str:
    """Return the rule of GenEval's layout that the metadata break; an empty string if they break none."""
    if not isinstance(metadata.get("include"), list) or not metadata["include"]:
        return 'they must have a list with one clause or more under "include"'
    exclude = metadata.get("exclude", [])
    if not isinstance(exclude, list):
        return '"exclude" must be a list'
    for number, clause in enumerate([*metadata["include"], *exclude]):
        kind, count = (clause.get(key) if isinstance(clause, dict) else None for key in ("class", "count"))
        if not isinstance(kind, str) or type(count) is not int or not 1 <= count <= MAX_OBJECTS:
            return f'each clause must have a "class" and a "count" from 1 to {MAX_OBJECTS}; got {clause}'
        if unknown := sorted(clause.keys() - _KEYS):
            return f"a clause has the keys {', '.join(_KEYS)}; got {unknown[0]!r}"
        if "color" in clause and clause["color"] not in COLOURS:
            return f'"color" must be one of {", ".join(COLOURS)}; got {clause["color"]!r}'
        if "position" in clause and clause["position"] not in [[name, i] for name in RELATIONS for i in range(number)]:
            names = ", ".join(RELATIONS)
            return f'"position" must be [{names}; number of an earlier clause]; got {clause["position"]}'
    return ""
