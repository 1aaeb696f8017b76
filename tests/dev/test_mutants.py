"""The mutants fit the code, which ``python dev/mutants.py`` then tests with them."""

from mutants import read_mutants, stale


def test_each_fragment_occurs_once() -> None:
    mutants = read_mutants()
    assert len(mutants) > 300 and not stale(mutants), stale(mutants)
