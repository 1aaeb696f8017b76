from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from solrl_lightning.artifacts.files import iterations_done, read_checkpoint
from solrl_lightning.callbacks import checkpoints
from solrl_lightning.callbacks.checkpoints import BestCheckpoint, LastCheckpoint, PeriodicCheckpoints
from solrl_lightning.callbacks.common import loop_of
from solrl_lightning.callbacks.ema import WeightEMA
from solrl_lightning.callbacks.export import ExportLoRA
from solrl_lightning.rewards.shapes import ShapesReward


def test_a_completed_run_exports_the_last_weights(tmp_path, fit, stand_in):
    module, best, average = stand_in.Falling(), BestCheckpoint(str(tmp_path)), WeightEMA()
    fit(average, best, ExportLoRA(), module=module, iterations=3, enable_checkpointing=True)
    assert (best.iteration, average.updates) == (2, 3) and torch.equal(module.exported, average.average["lora"])


def test_a_resumed_run_keeps_the_best_checkpoint_and_a_branch_begins_its_own(tmp_path, fit, stand_in, caplog):
    def best_of(folder, iterations, monitor=None, resumed=None, weight=0.0, comparable=True):
        best, options = BestCheckpoint(str(tmp_path / folder), monitor), dict(enable_checkpointing=True)
        module = stand_in.Falling()
        module.evaluation.comparable = comparable
        module.rewards.rewards["bright"], module.rewards.weights["bright"] = ShapesReward(), weight
        fit(best, module=module, iterations=iterations, resumed=resumed, **options)
        return best.state_dict()

    checkpoint = tmp_path / "run" / "best.ckpt"
    assert best_of("run", 2) == {"reward": 0.6, "iteration": 2}
    assert best_of("branch", 3, resumed=checkpoint) == {"reward": 0.3, "iteration": 3}
    assert (tmp_path / "branch" / "best.ckpt").is_file()
    assert best_of("run", 3, resumed=checkpoint) == {"reward": 0.6, "iteration": 2}
    earlier = checkpoint.read_bytes()
    assert best_of("run", 3, resumed=checkpoint, comparable=False) == {"reward": 0.3, "iteration": 3}
    assert [file.name for file in sorted(checkpoint.parent.iterdir())] == ["best.ckpt", "best_000002.ckpt"]
    assert checkpoint.with_stem("best_000002").read_bytes() == earlier != checkpoint.read_bytes()
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    assert best_of("run", 4, resumed=checkpoint.with_stem("best_000002")) == {"reward": 0.3, "iteration": 3}
    assert f"ckpt={checkpoint} is invalid: " in caplog.text and "The next evaluation writes it anew." in caplog.text
    assert best_of("other", 4, monitor="bright") == {"reward": -0.3, "iteration": 3}
    assert best_of("less", 4, monitor="bright", weight=-1.0) == {"reward": -0.6, "iteration": 2}


def test_a_best_checkpoint_that_was_deleted_is_named_by_a_resume_but_not_by_a_branch(tmp_path, fit, stand_in, caplog):
    def best_of(folder, iterations, resumed=None):
        best, options = BestCheckpoint(str(tmp_path / folder)), dict(enable_checkpointing=True, iterations=iterations)
        fit(best, LastCheckpoint(str(tmp_path / folder)), module=stand_in.Falling(), resumed=resumed, **options)
        return best.state_dict()

    last, deleted = tmp_path / "run" / "last.ckpt", tmp_path / "run" / "best.ckpt"
    best_of("run", 2)
    deleted.unlink()
    best_of("branch", 3, resumed=last)
    assert "is missing" not in caplog.text
    assert best_of("run", 3, resumed=last) == {"reward": 0.3, "iteration": 3} and deleted.is_file()
    assert f"{deleted} of iteration 2 is missing. The next evaluation writes it anew." in caplog.text


def test_the_first_rank_alone_reads_the_best_checkpoint(tmp_path, caplog):
    (tmp_path / "best.ckpt").write_bytes(b"damaged")
    best, sent = BestCheckpoint(str(tmp_path)), []

    def broadcast(state):
        sent.append(state)
        return {"reward": 0.6, "iteration": 2}  # what the first rank has read

    module = SimpleNamespace(evaluation=SimpleNamespace(comparable=True))
    strategy = SimpleNamespace(broadcast=broadcast)
    best.on_train_start(SimpleNamespace(is_global_zero=False, strategy=strategy), module)
    assert sent == [{}] and best.state_dict() == {"reward": 0.6, "iteration": 2} and not caplog.text


def test_the_best_checkpoint_of_a_run_that_was_killed_after_it_is_known_by_its_file(
    tmp_path, fit, stand_in, monkeypatch
):
    def best_of(iterations, resumed=None):
        best, options = BestCheckpoint(str(tmp_path)), dict(enable_checkpointing=True, iterations=iterations)
        fit(best, PeriodicCheckpoints(str(tmp_path), 1), module=stand_in.Falling(), resumed=resumed, **options)
        return best.state_dict()

    assert best_of(2) == {"reward": 0.6, "iteration": 2}
    monkeypatch.setattr(stand_in, "MEANS", (0.4, 0.5, 0.2, 0.3))
    assert best_of(3, resumed=tmp_path / "iteration_000001.ckpt") == {"reward": 0.6, "iteration": 2}
    assert iterations_done(read_checkpoint(tmp_path / "best.ckpt")) == 2


@pytest.mark.parametrize(
    ("every", "bytes_a_weight", "expected"), [(None, 20, [1, 2, 3, 4, 5]), (2, 20, [2, 4, 5]), (None, 10**10, [5])]
)
def test_the_last_iteration_has_a_checkpoint_and_large_ones_are_rare(
    tmp_path, fit, monkeypatch, every, bytes_a_weight, expected
):
    saved = []

    class Recorder(Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            saved.append(loop_of(trainer).iterations_done)

    monkeypatch.setattr(checkpoints, "CHECKPOINT_BYTES", bytes_a_weight)
    fit(LastCheckpoint(str(tmp_path), every), Recorder(), iterations=5, enable_checkpointing=True)
    assert saved == expected and [file.name for file in tmp_path.glob("*.ckpt")] == ["last.ckpt"]


def test_the_newest_checkpoints_of_every_few_iterations_are_kept(tmp_path, fit):
    for every, keep, iterations in ((2, None, [2, 4, 6]), (2, 2, [4, 6]), (4, 1, [4]), (0, None, [])):
        folder = tmp_path / f"{every}-{keep}"
        fit(PeriodicCheckpoints(str(folder), every, keep), iterations=6, enable_checkpointing=True)
        names = [f"iteration_{iteration:06d}.ckpt" for iteration in iterations]
        assert sorted(file.name for file in folder.glob("*")) == names


def test_checkpoints_of_a_later_training_do_not_count_as_the_newest(tmp_path, fit):
    def kept(keep, iterations, resumed=None):
        periodic = PeriodicCheckpoints(str(tmp_path), 1, keep)
        fit(periodic, iterations=iterations, resumed=resumed, enable_checkpointing=True)
        return sorted(int(file.stem.removeprefix("iteration_")) for file in tmp_path.glob("*.ckpt"))

    assert kept(None, 5) == [1, 2, 3, 4, 5]
    fit_from = tmp_path / "iteration_000001.ckpt"
    assert kept(2, 3, fit_from) == [2, 3, 4, 5]
