"""Targets of `Forks`: the command line whose standard output is closed, or has no reader any more."""

import os
import sys

from solrl_lightning.__main__ import main


def to_nowhere(arguments: list[str]) -> int:
    """As `>&-` in a shell, for which Python has no sys.stdout."""
    os.close(1)
    sys.stdout = None  # type: ignore[assignment]
    return main(arguments)


def to_no_reader(arguments: list[str]) -> int:
    """As `| head`, once that has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    return main(arguments)
