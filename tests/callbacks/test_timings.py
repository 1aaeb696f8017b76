import pytest
from lightning.pytorch import Callback

from solrl_lightning.callbacks.requantize import Requantize
from solrl_lightning.callbacks.timings import StageTimings
from solrl_lightning.training.stopwatch import Stopwatch


class Clock:
    """A clock that only the stages of ``Work`` advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Work(Callback):
    """Spends known seconds: 1 to requantise, 5 to explore, 3 to train, 2 to evaluate, 7 for the grid."""

    def __init__(self, clock) -> None:
        self.clock = clock

    def on_train_start(self, trainer, module):
        module.sync_samplers = lambda version: setattr(self.clock, "now", self.clock.now + 1)

    def spend(self, trainer, stage, seconds):
        with trainer.fit_loop.stopwatch.stage(stage):
            self.clock.now += seconds

    def on_train_epoch_start(self, trainer, module):
        self.spend(trainer, "explore", 5)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            with trainer.fit_loop.stopwatch.stage("train"):
                self.clock.now += 3
                self.spend(trainer, "evaluate", 2)

    def on_train_epoch_end(self, trainer, module):
        self.spend(trainer, "grid", 7)


def run(tmp_path, stand_in, monkeypatch, iterations, timings, ckpt_path=None, place=0):
    clock = Clock()
    monkeypatch.setattr("solrl_lightning.callbacks.timings.time.perf_counter", clock)
    callbacks = [Requantize(), Work(clock)]
    callbacks.insert(place, timings)
    trainer = stand_in.trainer(tmp_path, callbacks, max_epochs=iterations)
    trainer.fit_loop.stopwatch = Stopwatch(clock)
    trainer.fit(stand_in.Module(), stand_in.micro_batches(), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("place", [0, 1, 2])
def test_stages_are_exclusive_and_an_iteration_excludes_observing_stages(tmp_path, stand_in, monkeypatch, place):
    timings = StageTimings()
    trainer = run(tmp_path, stand_in, monkeypatch, 3, timings, place=place)
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        "time/requantize": 1.0,
        "time/explore": 5.0,
        "time/regenerate": 0.0,
        "time/train": 3.0,
        "time/iteration": 9.0,
    }
    assert timings.seconds_per_stage()["iteration"] == {"total": None, "median": 9.0}


def test_totals_have_every_stage_and_resume(tmp_path, stand_in, monkeypatch):
    timings = StageTimings()
    trainer = run(tmp_path, stand_in, monkeypatch, 2, timings)
    expected = {"requantize": 2.0, "explore": 10.0, "train": 6.0, "evaluate": 4.0, "grid": 14.0}
    assert timings.totals() == pytest.approx(expected)
    trainer.save_checkpoint(tmp_path / "x.ckpt")

    resumed = StageTimings()
    run(tmp_path, stand_in, monkeypatch, 3, resumed, ckpt_path=tmp_path / "x.ckpt")
    assert resumed.totals() == pytest.approx({name: value * 1.5 for name, value in expected.items()})
    assert len(resumed.history) == 3
