"""What an explorer and a run must have in common, by the option that decides it; `build.facts_of` tells it."""

import json
from typing import Any

SAMPLERS = "family.explore.sampler"
"""Of these an explorer may have more than a run needs."""
PRECISION = "precision"
"""An explorer's own; a run only records it."""

Facts = dict[str, Any]


def differences(there: Facts, here: Facts) -> list[str]:
    """Return what is another at an explorer, ``there``, than in the run, as text."""
    return [
        f"{name} is {there.get(name)} there and {value} here"
        for name, value in here.items()
        if not (set(value) <= set(there.get(name) or ()) if name == SAMPLERS else there.get(name) == value)
    ]


def read_facts(content: bytes) -> Facts:
    """Return the facts in an answer; raises ``ValueError`` if it is no JSON object."""
    facts = json.loads(content)
    if not isinstance(facts, dict):
        raise ValueError(f"got {facts!r}")
    return facts
