"""Exclusive wall time per stage, updated when a stage ends or when ``seconds`` is read.

GPU kernels run asynchronously; a clock that synchronises attributes them to the stage that launched them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class _Stage:
    def __init__(self, name: str, began: float) -> None:
        self.name, self.began = name, began
        self.done = self.total = 0


class Stopwatch:
    """Seconds of each stage since creation; an outer stage does not count the time of inner ones."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on_change: list[Callable[[], None]] = []
        """Functions to call when a stage begins, when it ends, and at each `progress`."""
        self._clock = clock
        self._stack: list[_Stage] = []
        self._seconds: dict[str, float] = {}
        self._charged_until = 0.0

    @property
    def current(self) -> str:
        """Name of the innermost stage; empty between stages."""
        return self._stack[-1].name if self._stack else ""

    @property
    def done(self) -> int:
        """Finished units of work in the current stage."""
        return self._stack[-1].done if self._stack else 0

    @property
    def total(self) -> int:
        """Units of work in the current stage; 0 if not reported."""
        return self._stack[-1].total if self._stack else 0

    @property
    def elapsed(self) -> float:
        """Seconds since the current stage began, including inner stages."""
        return self._clock() - self._stack[-1].began if self._stack else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage up to now, in order of first entry."""
        self._charge()
        return dict(self._seconds)

    def since(self, earlier: Mapping[str, float]) -> dict[str, float]:
        """Return ``seconds`` minus an ``earlier`` reading, for the stages that ran since."""
        spent = {name: value - earlier.get(name, 0.0) for name, value in self.seconds.items()}
        return {name: value for name, value in spent.items() if value > 0}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time inside to `name`; repeated names accumulate."""
        self._charge()
        self._stack.append(_Stage(name, self._charged_until))
        self._seconds.setdefault(name, 0.0)
        self._changed()
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()
            self._changed()

    def progress(self, done: int, total: int) -> None:
        """Report `done` of `total` units of work in the current stage."""
        self._stack[-1].done, self._stack[-1].total = done, total
        self._changed()

    def _charge(self) -> None:
        now = self._clock()
        if self._stack:
            self._seconds[self.current] += now - self._charged_until
        self._charged_until = now

    def _changed(self) -> None:
        for listener in self.on_change:
            listener()
