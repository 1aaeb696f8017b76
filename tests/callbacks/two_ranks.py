"""Trains on two gloo ranks with uneven prompts; writes the logged values to metrics.json.

Rank 0 and rank 1 have 0 and 2 prompts in iteration 0, 1 and 2 prompts in iteration 1. All callbacks of the package
run but those of checkpoints and export.
"""

import json
from pathlib import Path

from conftest import MicroBatches, RollOut, StandIn, make_trainer
from nano import prompts_of

from solrl_lightning.callbacks.alarms import Limits
from solrl_lightning.callbacks.ema import WeightEMA
from solrl_lightning.callbacks.guard import Guard
from solrl_lightning.callbacks.history import MetricHistory
from solrl_lightning.callbacks.progress import StageProgressBar
from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.callbacks.requantize import Requantize
from solrl_lightning.callbacks.rollout_stats import RolloutStats
from solrl_lightning.callbacks.sample_grid import SampleGrid
from solrl_lightning.callbacks.summary import RunSummary
from solrl_lightning.callbacks.timings import StageTimings

PROMPTS = {0: ("", "ab"), 1: ("c", "de")}  # iteration -> prompts of each rank


class UnevenRollOut(RollOut):
    def prompts_in(self, trainer):
        return prompts_of(PROMPTS[trainer.current_epoch][trainer.global_rank])


def train(arguments: list[str]) -> int:
    """A target of `Forks`."""
    (folder,) = map(Path, arguments)
    history = MetricHistory()
    callbacks = [
        *(StageTimings(), Requantize(), WeightEMA(), RolloutStats(), RankCorrelation(probe_every=1)),
        Guard(stop=False, patience=1, limits=Limits(fall=None, diversity=None, kl=None, drift=None)),
        SampleGrid(every=1, prompts=1, seeds_per_prompt=1, steps=1, seed=0),
        *(StageProgressBar(), history, RunSummary({"seed": 0})),
    ]
    options = dict(devices=2, strategy="ddp", enable_progress_bar=True)
    trainer = make_trainer(folder, callbacks, UnevenRollOut(), iterations=2, **options)
    trainer.fit(StandIn(), MicroBatches())
    if trainer.is_global_zero:
        (folder / "metrics.json").write_text(json.dumps(history.rows))
    return 0
