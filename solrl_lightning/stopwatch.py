"""Where the seconds of an iteration go, stage by stage. No threads: a stage is charged when it is left or looked at.

A GPU runs behind the Python program; give a clock that waits for it where stages must not borrow from each other:
`Stopwatch(clock=lambda: (torch.cuda.synchronize(), time.perf_counter())[1])`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Stage:
    def __init__(self, name: str) -> None:
        self.name = name
        self.done = 0
        self.total = 0


class Stopwatch:
    """Exclusive times of nested stages: the time of an inner stage is not charged to the outer one."""

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
        """Units of work in the current stage; 0 where it was not announced."""
        return self._stack[-1].total if self._stack else 0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage since the last reset, up to now; stages in the order of their first entry."""
        self._charge()
        return dict(self._seconds)

    def reset(self) -> None:
        """Forget all seconds. A stage that is running goes on and starts from zero."""
        self._seconds = {}
        if self._stack:
            self._charged_until = self._clock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`. The same name may come again; its seconds add up."""
        if self._stack:
            self._charge()
        else:
            self._charged_until = self._clock()
        self._stack.append(_Stage(name))
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
        if not self._stack:
            raise RuntimeError("progress belongs to a stage; enter one with `with stopwatch.stage(name):` first")
        self._stack[-1].done, self._stack[-1].total = done, total
        self._changed()

    def _charge(self) -> None:
        if self._stack:
            now = self._clock()
            self._seconds[self.current] = self._seconds.get(self.current, 0.0) + now - self._charged_until
            self._charged_until = now

    def _changed(self) -> None:
        for listener in self.on_change:
            listener()
