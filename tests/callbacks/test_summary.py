import json
import re
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from solrl_lightning.artifacts.files import finite_only
from solrl_lightning.artifacts.loggers import TensorBoard, Tracker
from solrl_lightning.callbacks.common import find_callback
from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.callbacks.summary import RunSummary, base_and_final, format_summary, rank_fidelity, selection
from solrl_lightning.callbacks.timings import StageTimings
from solrl_lightning.machine.memory import peak_memory
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards

HPARAMS = {"family": "sol_rl", "seed": 1, "learning_rate": 3e-4}


class RaiseIn(Callback):
    def __init__(self, iteration: int, exception: BaseException) -> None:
        self.iteration, self.exception = iteration, exception

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (self.iteration, 1):
            raise self.exception


class Watched(Callback):
    """Adds a second reward of weight 0 that falls by 0.01 an iteration, and logs a distance of the policy."""

    def setup(self, trainer, module, stage):
        shapes = ShapesReward()
        module.rewards = WeightedRewards({"shapes": shapes, "bright": shapes}, {"shapes": 1.0, "bright": 0.0})

    def on_validation_end(self, trainer, module):
        row = module.evaluation.history[-1]
        row |= {"weighted_sum": row["shapes"], "bright": 0.75 - 0.01 * row["iteration"]}

    def on_train_epoch_end(self, trainer, module):
        module.log("policy/base_distance", float(trainer.current_epoch + 1))


@pytest.fixture
def run(fit, stand_in):
    def run(iterations, *extra, **options):
        callbacks = StageTimings(), RankCorrelation(probe_every=1), *extra, RunSummary(HPARAMS)
        return fit(*callbacks, iterations=iterations, module=stand_in.Evaluated(), **options)

    return run


def read(tmp_path):
    return json.loads((tmp_path / "summary.json").read_text())


def checkpoints(tmp_path):
    options = dict(filename="last", enable_version_counter=False, save_on_train_epoch_end=True)
    return ModelCheckpoint(tmp_path / "checkpoints", **options)


def test_completed_run_writes_and_prints_its_summary(tmp_path, run, capsys):
    (tmp_path / "lora").mkdir()
    (tmp_path / ".hydra").mkdir()
    run(3)
    summary = read(tmp_path)
    assert (summary["status"], summary["error"], summary["iterations"]) == ("completed", None, 3)
    assert summary["final_reward_iteration"] == 3 and summary["other_rewards"] == {}
    assert summary["base_reward"] == 0.5
    assert summary["final_reward"] == pytest.approx(0.5 + 0.1 * (1 - 0.8**3))
    assert summary["improvement"] == pytest.approx(0.1 * (1 - 0.8**3))
    assert [row["iteration"] for row in summary["evaluations"]] == [0, 1, 2, 3]
    assert summary["precision_backend"] == "nvfp4 (emulated)"
    assert summary["rank_fidelity"]["probes"] == 3
    assert summary["rank_fidelity"]["mean"]["spearman"] == pytest.approx(1.0)
    assert summary["rank_fidelity"]["last"]["iteration"] == 3
    assert summary["seconds_per_stage"]["explore"]["median"] <= summary["seconds_per_stage"]["explore"]["total"]
    assert summary["seconds_per_stage"]["iteration"]["median"] <= summary["seconds_total"]
    assert summary["seconds_total"] < summary["seconds_since_process_start"] < 86400
    assert summary["peak_memory_bytes"] > 50 * 2**20 and summary["peak_memory_reserved_bytes"] is None
    assert summary["config"] == HPARAMS
    paths = {"run": ".", "lora": "lora", "report": "report.html", "config": ".hydra"}
    assert summary["paths"] == {name: str(tmp_path / path) for name, path in paths.items()}
    assert summary["versions"].keys() >= {"solrl_lightning", "torch", "lightning", "diffusers"}
    assert summary["machine"]["cores"] >= 1 and summary["machine"]["device"].startswith("CPU ")

    printed = capsys.readouterr().out
    assert re.search(r"completed after 3 iterations in \d+ s \(\d+ s with start-up\)\n", printed)
    assert "0.5000 -> 0.5488 (+0.0488), evaluated after 3 iterations" in printed
    assert "1.0000, mean of 3 probes, each of another prompt (1.0000 first, 1.0000 last)" in printed
    assert re.search(r"an iteration +median \d[.]\d\d s [(].*[)], without evaluation, probe", printed)
    assert re.search(r"of an iteration; selection .* here: .* [(]estimated from 3 probes[)] and takes", printed)
    ratio, medians = summary["rank_fidelity"]["mean"]["spread_ratio"], summary["seconds_per_stage"]
    whole, explore, sample = (medians[name]["median"] or 0.0 for name in ("iteration", "explore", "regenerate"))
    cost = whole / (whole - explore - sample + 1.5 * sample)
    assert summary["selection"] == pytest.approx({"gain": ratio**0.8, "cost": cost, "probes": 3})
    loop = SimpleNamespace(explored=True, iterations_done=2, passes_without_selection=1.5)  # one may have compiled
    assert selection(loop, summary["rank_fidelity"], medians) is None
    assert f"a next run should have; ckpt=last hydra.run.dir={tmp_path} iterations=6 trains on" in printed
    assert f"use the result, ckpt={tmp_path}/checkpoints/last.ckpt\n" in printed
    assert f"{tmp_path}, with report.html\n" in printed and "reserved" not in printed
    of_ranks = format_summary(summary | {"machine": summary["machine"] | {"devices": 2}})
    assert "mean of 3 probes, each of 2 other prompts (" in of_ranks
    some = format_summary(summary | {"rank_fidelity": summary["rank_fidelity"] | {"ranked": 2}})
    assert "1.0000, mean of 2 of 3 probes (the others have no order), each of another prompt (" in some
    stopped = {"status": "failed", "error": "e", "last_checkpoint_iterations": None}
    assert "none was written yet; the same overrides with ckpt=auto" in format_summary(summary | stopped)
    branch = format_summary(summary | stopped | {"ckpt": "other/checkpoints/last.ckpt"})
    assert summary["ckpt"] is None and "yet; the same command with another hydra.run.dir begins again\n" in branch
    once = format_summary(summary | {"rank_fidelity": summary["rank_fidelity"] | {"probes": 1}})
    assert re.search(r"proxy spearman +1[.]0000, of 1 probe\n", once)
    moved = format_summary(summary | {"paths": {"run": "runs/a"}})  # as by mv, while it trained
    assert "renamed or removed during the run; to resume, copy its .hydra here" in moved and "trains on" not in moved
    names = "status, shapes reward, alarms, an iteration, exploring, proxy spearman, precision, peak memory"
    assert (
        ", ".join(line[2:].split("  ")[0] for line in printed.splitlines() if line.startswith("  "))
        == f"{names}, run folder, next"
    )
    written = [(tmp_path / name).stat().st_mtime_ns for name in ("report.html", "summary.json")]
    assert written[0] < written[1], "a run that is killed between them has not ended"


def test_interrupted_run_names_the_iterations_of_its_evaluation_and_its_checkpoint(tmp_path, run, capsys):
    options = dict(enable_checkpointing=True, check_val_every_n_epoch=2)
    with pytest.raises(SystemExit):
        run(5, RaiseIn(3, KeyboardInterrupt()), checkpoints(tmp_path), **options)
    summary = read(tmp_path)
    assert (summary["status"], summary["error"], summary["iterations"]) == ("interrupted", None, 4)
    # The fourth optimiser step was taken; the last evaluation was after the second.
    assert summary["final_reward"] == pytest.approx(0.5 + 0.1 * (1 - 0.8**2))
    assert (summary["final_reward_iteration"], summary["last_checkpoint_iterations"]) == (2, 3)
    printed = capsys.readouterr().out
    assert "interrupted after 4 iterations" in printed and "(+0.0360), evaluated after 2 iterations" in printed
    assert re.search(r"last checkpoint +after 3 iterations; a resume repeats the later ones\n", printed)


def test_a_repeated_evaluation_replaces_that_of_the_interrupted_iteration(run):
    trainer = run(2)
    module = trainer.lightning_module
    module.evaluation.history.append({"iteration": 2, "shapes": 0.9})
    facts = find_callback(trainer, RunSummary).collect(trainer, module, "completed", None)
    assert [row["iteration"] for row in facts["evaluations"]] == [0, 1, 2]
    assert (facts["final_reward"], facts["final_reward_iteration"]) == (0.9, 2)


def test_every_reward_is_reported_and_one_of_weight_0_is_marked(tmp_path, run, capsys):
    run(2, Watched())
    shapes, bright = (read(tmp_path)["other_rewards"][name] for name in ("shapes", "bright"))
    assert shapes == {"weight": 1.0, "base": 0.5, "final": read(tmp_path)["final_reward"]}
    assert bright == {"weight": 0.0, "base": 0.75, "final": pytest.approx(0.73)}
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines() if " reward " in line]
    assert rows == [
        ["weighted_sum", "reward", "0.5000 -> 0.5360 (+0.0360), evaluated after 2 iterations"],
        ["shapes", "reward", "0.5000 -> 0.5360 (+0.0360)"],
        ["bright", "reward", "0.7500 -> 0.7300 (-0.0200), weight 0: not trained on"],
    ]


def test_failed_run_writes_its_error_and_one_that_fails_to_start_keeps_it(tmp_path, run):
    with pytest.raises(RuntimeError, match="loss is not finite"):
        run(5, RaiseIn(1, RuntimeError("loss is not finite")))
    assert (read(tmp_path)["status"], read(tmp_path)["error"]) == ("failed", "RuntimeError: loss is not finite.")
    before = (tmp_path / "summary.json").read_bytes()
    with pytest.raises(FileNotFoundError):
        run(2, resumed=tmp_path / "missing.ckpt")
    assert (tmp_path / "summary.json").read_bytes() == before


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")  # as the command line does
def test_resume_restores_base_reward_times_and_the_first_metrics(tmp_path, run):
    last, parts = tmp_path / "checkpoints" / "last.ckpt", (Watched(), checkpoints(tmp_path))
    run(2, *parts, enable_checkpointing=True)
    first = read(tmp_path)
    assert first["policy_metrics"] == {"policy/base_distance": {"first": 1.0, "last": 2.0}}
    run(4, *parts, enable_checkpointing=True, resumed=last)
    summary = read(tmp_path)
    assert summary["policy_metrics"] == {"policy/base_distance": {"first": 1.0, "last": 4.0}}
    assert (summary["base_reward"], summary["iterations"]) == (0.5, 4)
    assert [row["iteration"] for row in summary["evaluations"]] == [0, 1, 2, 3, 4]
    assert summary["rank_fidelity"]["probes"] == 4
    assert summary["seconds_total"] > first["seconds_per_stage"]["explore"]["total"]
    assert (summary["paths"]["last_checkpoint"], summary["last_checkpoint_iterations"]) == (str(last), 4)


def test_a_tracker_has_the_options_before_anything_else(run):
    class Recorder(Logger):
        name, version = "recorder", 0
        calls: ClassVar = []

        def log_metrics(self, metrics, step=None):
            self.calls.append(metrics)

        log_hyperparams = log_metrics

    run(1, logger=Tracker("recorder", Recorder()))
    assert Recorder.calls[0] == HPARAMS and len(Recorder.calls) > 1


def test_columns_and_results_are_in_tensorboards_hparams_table(tmp_path, run):
    run(
        2, logger=Tracker("tensorboard", TensorBoard(tmp_path, name="", version="tensorboard", default_hp_metric=False))
    )
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (final,) = events.Scalars("summary/final_reward")
    assert (final.step, final.value) == (2, pytest.approx(read(tmp_path)["final_reward"]))
    mean = read(tmp_path)["rank_fidelity"]["mean"]["spearman"]
    assert events.Scalars("summary/rank_spearman")[-1].value == pytest.approx(mean)
    content = events.PluginTagToContent("hparams")
    table = HParamsPluginData.FromString(content["_hparams_/experiment"]).experiment
    assert [column.name for column in table.hparam_infos] == ["family", "seed"]
    assert table.metric_infos[0].name.tag == "summary/final_reward"
    assert "_hparams_/session_start_info" in content
    assert "epoch" not in events.Tags()["scalars"]


def test_table_of_a_gpu_run_has_the_reserved_memory_and_one_iteration_is_not_plural(tmp_path, run, monkeypatch, capsys):
    run(1)
    printed = capsys.readouterr().out
    assert "completed after 1 iteration in" in printed and "evaluated after 1 iteration\n" in printed
    assert re.search(r"alarms +nothing watched: callbacks.guard is off\n", printed)
    assert re.search(r"alarms +none\n", format_summary(read(tmp_path) | {"guarded": True}))
    assert "1 iteration in" in (tmp_path / "report.html").read_text()
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: 5 * 2**30)
    assert peak_memory(torch.device("cuda", 0)) == (3 * 2**30, 5 * 2**30)
    memory = {"peak_memory_bytes": 3 * 2**30, "peak_memory_reserved_bytes": 5 * 2**30}
    assert "3.00 GiB, 5.00 GiB reserved\n" in format_summary(read(tmp_path) | memory)


def test_a_run_that_a_callback_has_ended_says_so(run, capsys):
    class Stop(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = True

    run(3, Stop())
    assert "stopped early after 1 iteration in" in (printed := capsys.readouterr().out)
    assert ", by a callback that set trainer.should_stop\n" in printed


def test_base_and_final_are_none_without_an_evaluation():
    assert base_and_final([], "shapes") == (None, None, None)
    assert base_and_final([{"iteration": 4, "shapes": 0.7}], "shapes") == (None, 0.7, 4)


def test_mean_fidelity_is_that_of_the_probes_that_have_one():
    ranks = RankCorrelation(probe_every=1)
    ranks.history = [{"iteration": i, "spearman": value} for i, value in enumerate((float("nan"), 0.5, 0.7))]
    fidelity = rank_fidelity(ranks)
    assert fidelity["mean"] == {"spearman": pytest.approx(0.6)}
    assert (fidelity["probes"], fidelity["ranked"]) == (3, 2)


def test_finite_only_replaces_nan_and_infinity_by_none():
    assert finite_only({"a": [float("nan"), 1.0], "b": {"c": float("inf")}}) == {"a": [None, 1.0], "b": {"c": None}}
