"""Targets of `Forks`: the command line whose standard output is closed, or has no reader any more."""

import os
import sys
from typing import Any

from lightning.pytorch import Callback

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


class HangUp(Callback):
    """Closes the terminal when training starts."""

    terminal: int

    def on_train_start(self, *args: Any) -> None:
        os.close(self.terminal)


def to_lost_terminal(arguments: list[str]) -> int:
    """As after `disown` in a terminal that is then closed."""
    HangUp.terminal, output = os.openpty()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, descriptor)
        setattr(sys, name, open(descriptor, "w", closefd=False))
    os.close(output)
    return main([*arguments, f"+callbacks.hang_up._target_={__name__}.HangUp"])
