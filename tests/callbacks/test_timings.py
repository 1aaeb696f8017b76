import pytest
from lightning.pytorch import Callback

from solrl_lightning.callbacks.requantize import Requantize
from solrl_lightning.callbacks.timings import StageTimings
from solrl_lightning.training.stopwatch import Stopwatch


class Work(Callback):
    """Spends known seconds: 1 to requantise, 5 to explore, 3 to train, 2 to evaluate, 7 for the grid."""

    now = 0.0

    def on_train_start(self, trainer, module):
        module.requantize = lambda version: self.advance(1)

    def advance(self, seconds):
        self.now += seconds

    def spend(self, trainer, stage, seconds):
        with trainer.fit_loop.stopwatch.stage(stage):
            self.advance(seconds)

    def on_train_epoch_start(self, trainer, module):
        self.spend(trainer, "explore", 5)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            with trainer.fit_loop.stopwatch.stage("train"):
                self.advance(3)
                self.spend(trainer, "evaluate", 2)

    def on_train_epoch_end(self, trainer, module):
        self.spend(trainer, "grid", 7)


@pytest.fixture
def run(tmp_path, stand_in, monkeypatch):
    def run(iterations, ckpt_path=None, place=0):
        work, timings = Work(), StageTimings()
        monkeypatch.setattr("solrl_lightning.callbacks.timings.time.perf_counter", lambda: work.now)
        callbacks = [Requantize(), work]
        callbacks.insert(place, timings)
        trainer = stand_in.make_trainer(tmp_path, callbacks, iterations=iterations)
        trainer.fit_loop.stopwatch = Stopwatch(lambda: work.now)
        trainer.fit(stand_in.StandIn(), stand_in.MicroBatches(), ckpt_path=ckpt_path)
        return trainer, timings

    return run


@pytest.mark.parametrize("place", [0, 1, 2])
def test_stages_are_exclusive_and_an_iteration_excludes_observing_stages(run, place):
    trainer, timings = run(3, place=place)
    seconds = {"requantize": 1.0, "explore": 5.0, "regenerate": 0.0, "train": 3.0, "iteration": 9.0}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged == {f"time/{name}": value for name, value in seconds.items()}
    timings.history[0]["iteration"] = 90.0
    assert timings.seconds_per_stage()["iteration"] == {"total": None, "median": 9.0}


def test_totals_have_every_stage_and_resume(tmp_path, run):
    trainer, timings = run(2)
    expected = {"requantize": 2.0, "explore": 10.0, "train": 6.0, "evaluate": 4.0, "grid": 14.0}
    assert timings.totals() == pytest.approx(expected)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    _, branch = run(3, ckpt_path=tmp_path / "x.ckpt")
    assert len(branch.history) == 1  # without the iterations before it
    trainer.save_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    _, resumed = run(3, ckpt_path=tmp_path / "x.ckpt")
    assert resumed.totals() == pytest.approx({name: value * 1.5 for name, value in expected.items()})
    assert len(resumed.history) == 3
