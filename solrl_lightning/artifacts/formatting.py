"""Numbers and command lines as text."""

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path


def numbers(values: Sequence[float | None], digits: int = 4, signed: bool = False) -> list[str]:
    """Return numbers with equal decimals: as many as give the largest ``digits`` significant digits; "-" for None."""
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    return [_text(value, _decimals(max(sizes, default=0.1), digits), signed) for value in values]


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with significant digits; "-" for None."""
    return numbers([value], digits)[0]


def two_decimals(*values: float | None) -> list[str]:
    """Return numbers with two decimals, or with two digits of the largest where it has fewer; "-" for None."""
    largest = max((abs(value) for value in values if value and math.isfinite(value)), default=1.0)
    return [_text(value, max(2, _decimals(largest, 2))) for value in values]


def measured(value: float | None, error: float | None = None, signed: bool = False) -> str:
    """Return ``value ± error``, the error with two significant digits; "-" for None."""
    if value is None or not error:
        return numbers([value], signed=signed)[0]
    decimals = _decimals(error, 2)
    return f"{_text(value, decimals, signed)} ± {_text(error, decimals)}"


def difference(before: float, after: float) -> str:
    """Return ``after - before`` with the decimals of the larger, or more if it would have fewer than two digits."""
    change, largest = after - before, max(abs(before), abs(after))
    decimals = _decimals(largest, 4) if largest else 4
    return _text(change, max(decimals, _decimals(abs(change), 2)) if change else decimals, signed=True)


def change(before: float, after: float, error: float | None) -> str:
    """Return ``after - before`` with its error, if it is known."""
    return measured(after - before, error, signed=True) if error else difference(before, after)


def _decimals(size: float, digits: int) -> int:
    """Return the decimals with which a number of this size has significant digits; negative without any."""
    return digits - 1 - math.floor(math.log10(size))


def _text(value: float | None, decimals: int, signed: bool = False) -> str:
    if value is None:
        return "-"
    plus, is_extreme = "+" * signed, decimals > 8 or abs(value) >= 1e7
    return f"{value:{plus}.3e}" if is_extreme else f"{value:{plus},.{max(decimals, 0)}f}"


def counted(number: int, noun: str) -> str:
    """Return a text such as ``1 iteration`` or ``2 iterations``."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def gibibytes(number: float) -> str:
    return f"{number / 2**30:.2f} GiB"


def duration(seconds: float) -> str:
    """Return a text of seconds, or of minutes or hours where there are many."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def command_line(arguments: Sequence[str]) -> str:
    """Return ``python -m solrl_lightning`` and arguments for a shell: flags first, double quotes around single ones."""
    flags_first = sorted(arguments, key=lambda argument: not argument.startswith("-"))
    return " ".join(["python -m solrl_lightning", *map(shell_quoted, flags_first)])


def path_option(key: str, path: Path | str) -> str:
    """Return ``key=path`` for a shell and Hydra's grammar."""
    plain = re.fullmatch(r"[A-Za-z0-9_./@:+-]+", str(path))
    return shell_quoted(f"{key}={path if plain else quoted(path)}")


def quoted(path: Path | str) -> str:
    """Return a path as a value of Hydra's grammar."""
    escaped = str(path).replace("'", "\\'")
    return f"'{escaped}'"


def shell_quoted(argument: str) -> str:
    """Return an argument for a POSIX shell."""
    if "'" in argument and not re.search(r'["$`\\!]', argument):
        return f'"{argument}"'
    return shlex.quote(argument)
