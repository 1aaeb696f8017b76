"""Numbers as text."""


def measured(value: float | None, error: float | None = None, form: str = ".4f") -> str:
    """``value ± error``; "-" for None."""
    if value is None:
        return "-"
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form.lstrip('+')}}")


def counted(number: int, noun: str) -> str:
    """``1 iteration``, ``2 iterations``."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def gibibytes(number: float) -> str:
    return f"{number / 2**30:.2f} GiB"


def duration(seconds: float) -> str:
    """Seconds, or minutes or hours where there are many."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
