"""Exclusive wall time of nested stages, updated when a stage ends or when ``seconds`` is read.

A GPU runs asynchronously; give a clock that waits for it, so that a stage is charged for the kernels that it launched.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class _Stage:
    def __init__(self, name: str, began: float) -> None:
        self.name, self.began = name, began
        self.done = self.total = 0


class Stopwatch:
    """Seconds of each stage since it was created; the time of an inner stage is not charged to the outer one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on_change: list[Callable[[], None]] = []
        """Called when a stage begins, when it ends, and at each `progress`."""
        self._clock = clock
        self._stack: list[_Stage] = []
        self._seconds: dict[str, float] = {}
        self._charged_until = 0.0

    @property
    def current(self) -> str:
        """The innermost stage; empty between stages."""
        return self._stack[-1].name if self._stack else ""

    @property
    def done(self) -> int:
        """Units of work finished in the current stage."""
        return self._stack[-1].done if self._stack else 0

    @property
    def total(self) -> int:
        """Units of work in the current stage; 0 if it was not reported."""
        return self._stack[-1].total if self._stack else 0

    @property
    def elapsed(self) -> float:
        """Seconds since the current stage began, with those of stages inside of it."""
        return self._clock() - self._stack[-1].began if self._stack else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage up to now, in the order of their first entry."""
        self._charge()
        return dict(self._seconds)

    def since(self, earlier: Mapping[str, float]) -> dict[str, float]:
        """``seconds`` less those of an ``earlier`` reading, of the stages that ran since."""
        spent = {name: value - earlier.get(name, 0.0) for name, value in self.seconds.items()}
        return {name: value for name, value in spent.items() if value > 0}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Charges the time inside to `name`. The seconds of a name that is used again add up."""
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
        """Reports `done` of `total` units of work in the current stage."""
        if not self._stack:
            raise RuntimeError("progress belongs to a stage; enter one with `with stopwatch.stage(name):` first")
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
