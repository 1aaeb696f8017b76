"""Seconds per stage, per iteration and for the whole run.

``time/iteration`` runs from the start of the Lightning epoch to its end without the stages that only observe training
(evaluation, rank probe, sample grids); the probe's seconds are ``time/probe``. Saving the checkpoint, which Lightning
does after every other callback, is not in it either. Stage times are exclusive: a nested stage is not counted in the
stage around it.
"""

import time
from collections import Counter, deque
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.callbacks.common import EXTRA_STAGES, STAGES, log_values, loop_of
from solrl_lightning.stopwatch import Stopwatch

_WINDOW = 1000  # iterations that medians look back on; bounds the size of the checkpoint


class StageTimings(Callback):
    """Logs ``time/{explore,regenerate,train,requantize,iteration}`` in seconds (mean over ranks), and keeps totals.

    It resets the stopwatch when it has read it at the end of an iteration, so its place among the callbacks is free.
    """

    def __init__(self) -> None:
        self.history: deque[dict[str, float]] = deque(maxlen=_WINDOW)
        self._closed: Counter[str] = Counter()  # seconds per stage up to the stopwatch's last reset
        self._stopwatch: Stopwatch | None = None
        self._started = 0.0
        self._before: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stopwatch = loop_of(trainer).stopwatch
        self._close(self._stopwatch)  # an evaluation ahead of the first iteration

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()
        self._before = loop_of(trainer).stopwatch.seconds  # by callbacks that stand ahead of this one

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stopwatch = loop_of(trainer).stopwatch
        seconds = stopwatch.seconds
        observed = sum(seconds.get(stage, 0.0) - self._before.get(stage, 0.0) for stage in EXTRA_STAGES)
        ahead = sum(self._before.get(stage, 0.0) for stage in STAGES)
        iteration = time.perf_counter() - self._started - observed + ahead
        self.history.append({stage: seconds.get(stage, 0.0) for stage in STAGES} | {"iteration": iteration})
        log_values(pl_module, {f"time/{name}": value for name, value in self.history[-1].items()})
        self._close(stopwatch)

    def _close(self, stopwatch: Stopwatch) -> None:
        self._closed.update(stopwatch.seconds)
        stopwatch.reset()

    def totals(self) -> dict[str, float]:
        """Seconds per stage since the run began, over resumes and with the iteration that is under way."""
        open_iteration = self._stopwatch.seconds if self._stopwatch is not None else {}
        return dict(self._closed + Counter(open_iteration))

    def medians(self) -> dict[str, float]:
        """Median seconds per iteration of every logged stage and of the iteration; empty before the first one ends."""
        if not self.history:
            return {}
        return {name: median(row[name] for row in self.history) for name in self.history[0]}

    def state_dict(self) -> dict[str, Any]:
        return {"totals": self.totals(), "history": list(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._closed = Counter(state_dict["totals"])
        self.history = deque(state_dict["history"], maxlen=_WINDOW)
