from solrl_lightning.callbacks import history
from solrl_lightning.callbacks.history import MetricHistory
from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.callbacks.rollout_stats import RolloutStats


def callbacks():
    return RolloutStats(), RankCorrelation(probe_every=2), MetricHistory()


def rows(trainer):
    """The rows without times."""
    kept = trainer.callbacks[2].rows
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in kept]


def test_a_row_has_what_its_iteration_logged_also_after_a_resume(fit):
    straight = rows(fit(*callbacks(), iterations=4))
    assert [row["iteration"] for row in straight] == [1, 2, 3, 4]
    assert all({"reward/mean", "reward/std", "rank/kept_spearman"} <= row.keys() for row in straight)
    assert ["rank/spearman" in row for row in straight] == [True, False, True, False]
    assert len({row["reward/mean"] for row in straight}) == 4
    assert rows(fit(*callbacks(), iterations=4, resumed=fit(*callbacks(), iterations=2))) == straight


def test_of_many_rows_every_second_one_is_dropped(fit, monkeypatch):
    monkeypatch.setattr(history, "_ROWS", 4)
    assert [row["iteration"] for row in rows(fit(*callbacks(), iterations=6))] == [2, 4, 6]
