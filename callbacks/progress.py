"""Progress bar over iterations with the stage, the mean reward, the rank correlation and the ETA.

Lightning's TQDMProgressBar counts the micro-batches of an epoch; the first one comes after minutes of exploration. It
also draws bars into log files, and what a module prints without a bar is lost.
"""

import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from shutil import get_terminal_size
from statistics import fmean, median_low

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from solrl_lightning.artifacts.formatting import number
from solrl_lightning.callbacks.common import EXTRA_STAGES, file_logger, find_callback, loop_of, module_of
from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.callbacks.rollout_stats import RolloutStats
from solrl_lightning.training.stopwatch import Stopwatch

_REDRAW_SECONDS = 0.1
_LINES = 50  # approximate number of lines of a run without a terminal
_COLUMNS = 70  # of the narrowest terminal that gets a bar; a terminal of unknown width gets lines, too
_FORMAT = "{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def seconds_left(
    iterations: int, plain: Sequence[float], extra: Sequence[float], elapsed: float = 0.0, stage: float = 0.0
) -> float | None:
    """Return the seconds until the run ends; None before the first iteration ends, or if the last one exceeds them.

    ``iterations`` are left, with the current one, which began ``elapsed`` seconds ago and whose stage takes about
    ``stage`` more. The low median of ``plain``, the seconds of finished iterations, ignores a first one that compiles,
    from the second on; the mean of ``extra``, the seconds of their evaluation, probe and grid, spreads evaluations,
    which run every few iterations.
    """
    if not plain:
        return None
    each = median_low(plain) + fmean(extra)
    left = max(iterations * each - elapsed, (iterations - 1) * each + stage)
    return left if left > 0 else None


class StageProgressBar(ProgressBar):
    """Shows one bar for the run on rank 0; without a wide terminal, prints a line every few iterations.

    The first iteration, the last, and those with an evaluation always have a line. A line has the seconds of the
    iteration (``time/iteration`` and the checkpoint saved before it), then the seconds of evaluation, probe and grid
    together. Must follow the callback that draws grids.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True  # read by LightningModule.print
        self._bar = tqdm(disable=True)
        self._plain: list[float] = []  # seconds of each finished iteration, and of what only observes it
        self._extra: list[float] = []
        self._mark = 0.0  # when the last iteration ended
        self._budget = math.inf  # seconds of training that were left then
        self._seconds: dict[str, float] = {}  # of the stopwatch, when the last iteration ended
        self._drawn = 0.0
        self._stopwatch = Stopwatch()

    def enable(self) -> None:
        self.is_enabled = True

    def disable(self) -> None:
        self.is_enabled = False

    def print(self, *args: object, sep: str = " ", end: str = "\n") -> None:
        self._bar.write(sep.join(map(str, args)), file=sys.stdout, end=end)
        sys.stdout.flush()

    def _open(self, trainer: Trainer, name: str, total: int | None, initial: int = 0) -> None:
        self._stopwatch = loop_of(trainer).stopwatch
        self._stopwatch.on_change.append(self._stage_changed)
        show = self.is_enabled and sys.stdout.isatty() and get_terminal_size((0, 0)).columns >= _COLUMNS
        place = {"file": sys.stdout, "bar_format": _FORMAT, "dynamic_ncols": True}
        self._bar = tqdm(desc=name, total=total, initial=initial, disable=not show, **place)

    def _close(self) -> None:
        if self._stage_changed in self._stopwatch.on_change:
            self._stopwatch.on_change.remove(self._stage_changed)
        self._bar.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, "iterations", trainer.max_epochs, trainer.current_epoch)
        self._seconds = self._stopwatch.seconds

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._plain:
            self._mark = time.perf_counter()  # the first iteration starts here, not at on_train_start

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now, spent = time.perf_counter(), self._stopwatch.since(self._seconds)
        extra = {stage: spent[stage] for stage in EXTRA_STAGES if stage in spent}
        self._seconds = self._stopwatch.seconds
        self._extra.append(sum(extra.values()))
        self._plain.append(now - self._mark - self._extra[-1])
        self._mark = now
        loop, done, expected = loop_of(trainer), trainer.current_epoch + 1, float(trainer.max_epochs or 0)
        if loop.max_seconds is not None:
            trained = loop.cost()["seconds"]
            self._budget = loop.max_seconds - trained
            expected = min(expected, done * loop.max_seconds / trained)
        if not self.is_enabled:
            return
        seconds = f"{self._plain[-1]:.1f} s"
        if extra:
            seconds += f" + {self._extra[-1]:.1f} s {', '.join(extra)}"
        results, held_out = self._results(done), self._held_out(done)
        line = " | ".join([f"iteration {done}/{trainer.max_epochs}", *results, *held_out, seconds, *self._eta(done)])
        file_logger.info(line)
        self._bar.update()
        self._draw()
        is_first, is_last = len(self._plain) == 1, done == trainer.max_epochs or trainer.should_stop
        is_due = self._bar.disable and (is_first or is_last or done % max(math.ceil(expected / _LINES), 1) == 0)
        if is_due or held_out:
            self.print(line)

    # Evaluation without training; in a training run it is a stage.

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._open(trainer, "evaluation", None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._close()
        history = module_of(pl_module).evaluation.history
        if self.is_enabled and len(history) == 1:  # also of a branch
            self.print(" | ".join(["before training", *self._held_out(history[0]["iteration"])]))

    def _stage_changed(self) -> None:
        watch = self._stopwatch
        if self.trainer.state.fn == "validate" and watch.total:
            self._bar.total, self._bar.n = watch.total, watch.done
            self._bar.refresh()
        elif time.perf_counter() - self._drawn >= _REDRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        if self._bar.disable:
            return
        self._drawn, done, stage = time.perf_counter(), self._bar.n, self._stopwatch.current
        if stage and self._stopwatch.total:
            stage += f" {100 * self._stopwatch.done // self._stopwatch.total}%"
        self._bar.set_postfix_str(", ".join(filter(None, [stage, *self._results(done), *self._eta(done)])))

    def _results(self, done: int) -> list[str]:
        """Return the reward and rank correlation of the last finished iteration, number ``done``."""
        stats, ranks = find_callback(self.trainer, RolloutStats), find_callback(self.trainer, RankCorrelation)
        facts = []
        if stats is not None and stats.last:
            facts.append(f"reward of the kept {number(stats.last['reward/mean'])}")
            if "explore/explorers" in stats.last:
                facts.append(
                    "explorers {explore/explorers:.0f}, {explore/explorers_lost:.0f} lost".format(**stats.last)
                )
        # Probed every few iterations; equal rewards have no correlation.
        if ranks is not None and ranks.last.get("iteration") == done and not math.isnan(ranks.last["spearman"]):
            facts.append(f"spearman {ranks.last['spearman']:.3f}")
        return facts

    def _held_out(self, done: int) -> list[str]:
        """Return the rewards of the evaluation after iteration ``done``; empty if there was none."""
        evaluation = module_of(self.trainer.lightning_module).evaluation
        if not evaluation.history or (row := evaluation.history[-1])["iteration"] != done:
            return []
        return [f"held-out {', '.join(f'{name} {number(row[name])}' for name in evaluation.names)}"]

    def _eta(self, done: int) -> list[str]:
        """Return the ETA; empty after the last iteration."""
        iterations = (self.trainer.max_epochs or 0) - done
        if iterations <= 0 or self.trainer.should_stop:
            return []
        units = self._stopwatch.done
        stage = self._stopwatch.elapsed * (self._stopwatch.total - units) / units if units else 0.0
        elapsed = time.perf_counter() - self._mark
        if self._plain and math.isfinite(self._budget):  # one that begins within max_seconds runs to its end
            iterations = min(iterations, max(1, math.ceil(self._budget / median_low(self._plain))))
        left = seconds_left(iterations, self._plain, self._extra, elapsed, stage)
        return ["ETA ?" if left is None else f"ETA {timedelta(seconds=round(left))}"]
