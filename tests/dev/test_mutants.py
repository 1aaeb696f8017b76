"""The mutants fit the code, which ``python dev/mutants.py`` then tests with them."""

from mutants import MUTANTS, ROOT


def test_each_fragment_occurs_once() -> None:
    stale = [
        f"{file}: {name}"
        for file, edits in MUTANTS.items()
        for name, old, *_ in edits
        if (ROOT / file).read_text(encoding="utf-8").count(old) != 1
    ]
    assert len(MUTANTS) > 50 and not stale, stale
