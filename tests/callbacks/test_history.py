import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from solrl_lightning.callbacks import history
from solrl_lightning.callbacks.history import MetricHistory
from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.callbacks.rollout_stats import RolloutStats


def rows(tmp_path, stand_in, iterations, ckpt_path=None):
    kept = MetricHistory()
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    callbacks = [RolloutStats(), RankCorrelation(probe_every=2), kept, saver]
    trainer = stand_in.trainer(tmp_path, callbacks, max_epochs=iterations, enable_checkpointing=True)
    trainer.fit(stand_in.Module(), stand_in.micro_batches(), ckpt_path=ckpt_path)
    return kept.rows


def test_a_row_has_what_its_iteration_logged_and_nothing_of_an_earlier_one(tmp_path, stand_in):
    found = rows(tmp_path, stand_in, 3)
    assert [row["iteration"] for row in found] == [1, 2, 3]
    assert all({"reward/mean", "reward/std", "rank/kept_spearman"} <= row.keys() for row in found)
    assert ["rank/spearman" in row for row in found] == [True, False, True]
    assert len({row["reward/mean"] for row in found}) == 3


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_a_resumed_run_has_the_rows_of_one_that_was_not_interrupted(tmp_path, stand_in):
    straight = rows(tmp_path / "straight", stand_in, 4)
    rows(tmp_path, stand_in, 2)
    resumed = rows(tmp_path, stand_in, 4, ckpt_path=tmp_path / "epoch=1.ckpt")

    def without_times(found):
        return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in found]

    assert without_times(resumed) == without_times(straight)


def test_of_many_rows_every_second_one_is_dropped(tmp_path, stand_in, monkeypatch):
    monkeypatch.setattr(history, "_ROWS", 4)
    assert [row["iteration"] for row in rows(tmp_path, stand_in, 6)] == [2, 4, 6]
