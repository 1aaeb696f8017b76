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


class Leave(Callback):
    """Ends the reader of the output after an iteration."""

    reader: int | None = None

    def on_train_epoch_end(self, *args: Any) -> None:
        if self.reader is not None:
            os.close(self.reader)
        Leave.reader = None


def to_leaving_reader(arguments: list[str]) -> int:
    """As `| tee`, which ends before the run."""
    Leave.reader, writer = os.pipe()
    os.dup2(writer, 1)
    return main([*arguments, f"+callbacks.leave._target_={__name__}.Leave"])


class Notify(Callback):
    """Writes to another program, which has ended."""

    def on_train_epoch_end(self, *args: Any) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        os.write(writer, b"done")


def to_a_reader_and_to_none(arguments: list[str]) -> int:
    """The output is read, and what the callback writes to is not."""
    return main([*arguments, f"+callbacks.notify._target_={__name__}.Notify"])


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
