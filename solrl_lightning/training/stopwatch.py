"""Exclusive wall time per stage.

GPU kernels run asynchronously; ``synchronize`` attributes them to the stage that launched them. It is called where
stages change, never to display progress.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from solrl_lightning.rollout.stage import EXPLORE, REGENERATE

STOPWATCH_STAGES = ("requantize", EXPLORE, REGENERATE, "train")
"""Names of what an iteration consists of; others only observe training."""


class Stopwatch:
    """Seconds of each stage since creation; an outer stage does not count the time of inner ones."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, synchronize: Callable[[], object] = lambda: None
    ) -> None:
        self.on_change: list[Callable[[], None]] = []
        """Functions to call when a stage begins, when it ends, and at each `progress`."""
        self.current = ""
        """Name of the innermost stage; empty between stages."""
        self.done = self.total = 0
        """Finished units of work of the current stage, and all of them; 0 if not reported."""
        self._clock, self._synchronize = clock, synchronize
        self._seconds: dict[str, float] = {}
        self._began = self._charged_until = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the current stage began, including inner stages; of a GPU, of the work launched so far."""
        return self._clock() - self._began if self.current else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage up to now, in order of first entry."""
        self._charge()
        return dict(self._seconds)

    def since(self, earlier: Mapping[str, float]) -> dict[str, float]:
        """Return ``seconds`` minus an ``earlier`` reading, for the stages that ran since."""
        seconds = {name: value - earlier.get(name, 0.0) for name, value in self.seconds.items()}
        return {name: value for name, value in seconds.items() if value > 0}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time inside to `name`; repeated names accumulate."""
        self._charge()
        outer = self.current, self._began, self.done, self.total
        self.current, self._began, self.done, self.total = name, self._charged_until, 0, 0
        self._seconds.setdefault(name, 0.0)
        self._changed()
        try:
            yield
        finally:
            self._charge()
            self.current, self._began, self.done, self.total = outer
            self._changed()

    def progress(self, done: int, total: int) -> None:
        """Report `done` of `total` units of work in the current stage."""
        self.done, self.total = done, total
        self._changed()

    def _charge(self) -> None:
        self._synchronize()
        now = self._clock()
        if self.current:
            self._seconds[self.current] += now - self._charged_until
        self._charged_until = now

    def _changed(self) -> None:
        for listener in self.on_change:
            listener()
