import io
import itertools
import re
import sys
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback

from solrl_lightning.callbacks.progress import StageProgressBar, seconds_left
from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.callbacks.rollout_stats import RolloutStats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class HalfExplored(Callback):
    """Reports progress during an exploration."""

    def on_train_epoch_start(self, trainer, module):
        with trainer.fit_loop.stopwatch.stage("explore"):
            trainer.fit_loop.stopwatch.progress(1, 4)


def test_seconds_left_are_iterations_times_median_plus_mean_evaluation():
    # The first iteration compiles for 60 s, the others take 10 s; every fourth iteration has an evaluation of 16 s.
    seconds, extra = [60.0, 10.0, 10.0, 10.0], [0.0, 0.0, 0.0, 16.0]
    assert seconds_left(5, seconds, extra) == 5 * (10 + 4)
    assert seconds_left(5, seconds, extra, elapsed=6.0) == 5 * (10 + 4) - 6
    assert seconds_left(7, seconds[:2], extra[:2]) == 7 * 10
    assert seconds_left(5, [], []) is None


def test_seconds_left_are_none_when_the_estimate_has_passed():
    seconds, extra = [10.0, 10.0], [0.0, 0.0]
    assert seconds_left(1, seconds, extra, elapsed=12.0) is None
    # The last iteration has the first evaluation of the run, which is half done after 8 s.
    assert seconds_left(1, seconds, extra, elapsed=18.0, stage=8.0) == 8.0
    assert seconds_left(3, seconds, extra, elapsed=18.0) == 20.0


def lines(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration ")]


def test_without_a_terminal_every_iteration_prints_a_line_with_its_results(fit, capsys):
    fit(RolloutStats(), RankCorrelation(probe_every=2), StageProgressBar(), iterations=3, enable_progress_bar=True)
    probed, plain, last = lines(capsys)
    eta, reward, seconds = r" \| ETA \d:\d\d:\d\d", r"reward of the kept 0\.\d{4}", r"\d+\.\d s"
    assert re.fullmatch(rf"iteration 1/3 \| {reward} \| spearman 1\.000 \| {seconds} \+ {seconds} probe{eta}", probed)
    assert re.fullmatch(rf"iteration 2/3 \| {reward} \| {seconds}{eta}", plain)
    assert re.fullmatch(rf"iteration 3/3 \| {reward} \| spearman 1\.000 \| {seconds} \+ {seconds} probe", last)


def test_long_run_prints_about_fifty_lines_and_always_the_first_and_the_last(fit, capsys):
    fit(StageProgressBar(), iterations=101, enable_progress_bar=True)
    printed = [line.partition(" |")[0] for line in lines(capsys)]
    assert printed == [f"iteration {i}/101" for i in (1, *range(3, 100, 3), 101)]


@pytest.mark.parametrize("output", [io.StringIO, Terminal])
def test_every_evaluation_prints_a_line_with_the_held_out_reward(fit, stand_in, monkeypatch, output):
    monkeypatch.setattr(sys, "stdout", output := output())
    monkeypatch.setenv("COLUMNS", "200")
    options = dict(module=stand_in.Evaluated(), enable_progress_bar=True, check_val_every_n_epoch=40)
    fit(StageProgressBar(), iterations=101, **options)
    printed = re.findall(r"iteration (\d+)/101 \| held-out shapes 0\.6000 \| ", output.getvalue())
    assert printed == ["40", "80"]


class Seconds(Callback):
    """Gives a run 100 seconds of training, of which each iteration takes 40."""

    def on_train_start(self, trainer, module):
        trainer.fit_loop.max_seconds = 100
        trainer.fit_loop.cost = lambda: {"seconds": 40.0 * (trainer.current_epoch + 1)}

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.current_epoch == 2


def test_seconds_of_training_limit_the_eta_and_the_number_of_lines(fit, capsys, monkeypatch):
    clock = SimpleNamespace(perf_counter=itertools.count(0, 10).__next__)
    monkeypatch.setattr("solrl_lightning.callbacks.progress.time", clock)
    fit(StageProgressBar(), Seconds(), iterations=101, enable_progress_bar=True)
    first, second, last = lines(capsys)
    assert first == "iteration 1/101 | 30.0 s | ETA 0:00:50"  # two more iterations, 10 s of them gone
    assert second == "iteration 2/101 | 40.0 s | ETA 0:00:20" and "ETA" not in last


def test_terminal_shows_one_bar_with_the_stage_that_resumes_at_its_iteration(fit, monkeypatch):
    monkeypatch.setattr("solrl_lightning.callbacks.progress._REDRAW_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    bar = RolloutStats(), StageProgressBar(), HalfExplored()
    trainer = fit(*bar, iterations=3, enable_progress_bar=True)
    drawn = terminal.getvalue()
    assert "explore 25%, ETA ?" in drawn
    assert re.search(r"1/3 \[.*explore 25%, reward of the kept 0\.\d{4}, ETA 0:00:0", drawn)
    assert "3/3" in drawn.splitlines()[-1]
    assert trainer.fit_loop.stopwatch.on_change == []

    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    fit(RolloutStats(), StageProgressBar(), iterations=5, resumed=trainer, enable_progress_bar=True)
    counts = re.findall(r"(\d)/5 \[", terminal.getvalue())
    assert (counts[0], counts[-1]) == ("3", "5")


@pytest.mark.parametrize(("terminal", "columns"), [(False, 200), (True, 200), (True, 40), (True, 0)])
def test_evaluation_without_training_shows_its_images(tmp_path, stand_in, monkeypatch, terminal, columns):
    class Chunks(stand_in.Evaluated):
        """Evaluates 6 images in chunks of 4."""

        def validation_step(self, batch, batch_idx):
            with self.trainer.fit_loop.stopwatch.stage("evaluate"):
                for done in (0, 4, 6):
                    self.trainer.fit_loop.stopwatch.progress(done, 6)

    monkeypatch.setattr(sys, "stdout", output := Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = columns == 200 and terminal  # in a narrow one, and where the width is not known, no bar can be read
    bar = [StageProgressBar()]
    trainer = stand_in.make_trainer(tmp_path, bar, enable_progress_bar=True, limit_val_batches=1)
    trainer.validate(Chunks(), stand_in.MicroBatches(), verbose=False)
    shown = output.getvalue()
    assert "before training | held-out shapes 0.5000\n" in shown and ("6/6" in shown) == terminal
    assert ("0/6" in shown and "1/1" not in shown) == terminal
    assert trainer.fit_loop.stopwatch.on_change == []
