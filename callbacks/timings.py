"""Records seconds per stage, per iteration and for the whole run.

``time/iteration`` is the duration of the Lightning epoch without the stages that only observe training (evaluation,
rank probe, sample grids), and without saving the checkpoint, because Lightning saves after all other callbacks.
"""

import time
from collections import Counter, deque
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.artifacts.run_folder import LAST
from solrl_lightning.callbacks.common import EXTRA_STAGES, log_values, loop_of
from solrl_lightning.training.stopwatch import STOPWATCH_STAGES, Stopwatch

_WINDOW = 1000  # iterations in the medians; limits the size of the checkpoint


class StageTimings(Callback):
    """Logs ``time/{explore,regenerate,train,requantize,iteration}`` in seconds (mean over ranks), and keeps totals."""

    def __init__(self) -> None:
        self.history: deque[dict[str, float]] = deque(maxlen=_WINDOW)
        self._stopwatch = Stopwatch()
        self._resumed: Counter[str] = Counter()  # seconds per stage of the runs that this one resumes
        self._last: dict[str, float] = {}  # the stopwatch's seconds when the last iteration ended
        self._first: dict[str, float] = {}  # the stopwatch's seconds when this iteration began
        self._started = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stopwatch = loop_of(trainer).stopwatch
        self._last = self._stopwatch.seconds
        if not trainer.strategy.broadcast((Path(trainer.default_root_dir) / LAST).is_file()):
            self.history.clear()  # of a run with other options, from which this one branches

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started, self._first = time.perf_counter(), self._stopwatch.seconds

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        since_last, since_start = self._stopwatch.since(self._last), self._stopwatch.since(self._first)
        stages = {stage: since_last.get(stage, 0.0) for stage in STOPWATCH_STAGES}
        iteration = time.perf_counter() - self._started - sum(since_start.get(stage, 0.0) for stage in EXTRA_STAGES)
        # Hooks of callbacks before this one:
        iteration += sum(stages[stage] - since_start.get(stage, 0.0) for stage in STOPWATCH_STAGES)
        self.history.append(stages | {"iteration": iteration})
        log_values(pl_module, {f"time/{name}": value for name, value in self.history[-1].items()})
        self._last = self._stopwatch.seconds

    def totals(self) -> dict[str, float]:
        """Return the seconds per stage of the run, with those before a resume and of the current iteration."""
        return dict(self._resumed + Counter(self._stopwatch.seconds))

    def seconds_per_stage(self) -> dict[str, dict[str, float | None]]:
        """Return, by stage, total seconds of the run and median seconds of an iteration; None if not recorded."""
        totals, logged = self.totals(), self.history[0] if self.history else {}
        medians = {name: median(row[name] for row in self.history) for name in logged}
        return {name: {"total": totals.get(name), "median": medians.get(name)} for name in totals | medians}

    def state_dict(self) -> dict[str, Any]:
        return {"totals": self.totals(), "history": list(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = Counter(state_dict["totals"])
        self.history = deque(state_dict["history"], maxlen=_WINDOW)
