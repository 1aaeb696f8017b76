"""Runs that are killed at their end, diverge, or continue from the state of a run with other prompts or rewards."""

import json
import os
import random
import re
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import small_runs
import torch
from forks import Forks
from lightning.pytorch import Callback, Trainer
from small_runs import Command, checkpoint, the_line
from torch import Tensor

import solrl_lightning.__main__
from solrl_lightning.artifacts.run_folder import claimed
from solrl_lightning.objectives.base import Loss
from solrl_lightning.objectives.nft import NFT
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rollout.records import TrainingBatch
from solrl_lightning.shapes.world import eval_captions, train_captions

SMALL = [*small_runs.SMALL, "data.eval_prompts=2", "evaluation.every=1", "logger=none"]
AUTO = ("ckpt=auto", "hydra.run.dir=run")


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def results(run: Path) -> dict[str, Any]:
    """What a run must have however often it was killed."""
    facts = summary(run)
    timed = {"seconds", "change_error", "standard_error"}
    rows = [{key: value for key, value in row.items() if key not in timed} for row in facts["evaluations"]]
    names = "status stopped_by base_reward final_reward best_reward best_iteration iterations alarms".split()
    return {name: facts[name] for name in names} | {
        "evaluations": rows,
        "rank_fidelity": facts["rank_fidelity"],
        "lora": (run / "lora" / "pytorch_lora_weights.safetensors").read_bytes(),
    }


def load(lora: bytes) -> dict[str, list[float]]:
    """Return the tensors of a file, whose header is in any order."""
    return {name: tensor.flatten().tolist() for name, tensor in safetensors.torch.load(lora).items()}


class Noisy(Reward):
    """Draws from the generators that the process has."""

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return images.mean((1, 2, 3)) + torch.randn(len(prompts)) + random.random() + np.random.rand()


@pytest.mark.slow
def test_what_a_reward_draws_is_the_same_in_a_resumed_run(command: Command, tmp_path: Path) -> None:
    noisy = (*SMALL, "~reward.shapes", f"+reward.noisy={{_target_:{__name__}.Noisy,weight:1.0}}")
    assert command(*noisy, "iterations=2", "hydra.run.dir=straight").status == 0
    assert command(*noisy, "iterations=1", "hydra.run.dir=run").status == 0
    assert command("ckpt=last", "hydra.run.dir=run", "iterations=2").status == 0
    straight, run = (results(tmp_path / name) for name in ("straight", "run"))
    assert load(straight.pop("lora")) == load(run.pop("lora")) and run == straight


class TerminateOnce(Callback):
    """Ends the job in its second iteration, when it runs for the first time."""

    left = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and self.left:
            type(self).left = 0
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_job_of_a_sweep_that_is_requeued_continues(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As submitit starts it again: Hydra calls the task in the same folder, without the checks of a command line."""
    terminate = f"+callbacks.terminate._target_={__name__}.TerminateOnce"
    sweep = ["-m", *SMALL, "iterations=3", "seed=1,2", terminate]
    assert command(*sweep, "hydra.sweep.dir=straight").status == 0
    checked: list[Any] = []
    prepare = solrl_lightning.__main__.prepare
    monkeypatch.setattr("solrl_lightning.__main__.prepare", lambda line: checked.append(prepare(line)) or checked[-1])
    TerminateOnce.left = 1
    done = command(*sweep, "hydra.sweep.dir=sweep")
    assert done.status == 143 and len(checked) == 1, done.err
    monkeypatch.setattr("solrl_lightning.__main__.prepare", lambda line: (checked[0][0], {}))
    done = command(*sweep, "hydra.sweep.dir=sweep")
    assert done.status == 0, done.err
    assert done.out.count("this job was started again: it continues ") == done.out.count("\niteration 1/3 ") == 1
    for straight in sorted((tmp_path / "straight").glob("*_*")):
        run = tmp_path / "sweep" / straight.name
        one, other = results(straight), results(run)
        assert load(one.pop("lora")) == load(other.pop("lora")) and one == other
        assert sorted(file.name for file in (run / ".hydra").iterdir()) == [
            "config.yaml",
            "hydra.yaml",
            "overrides.yaml",
        ]


# Killed at the end


@pytest.mark.slow
def test_run_killed_in_its_last_seconds_is_finished_by_the_same_command(forks: Forks, tmp_path: Path) -> None:
    options = ("iterations=4", "callbacks.guard.stop=true", "callbacks.guard.limits.drift=1")
    straight = forks.run(tmp_path, *SMALL, *options, "hydra.run.dir=straight")
    assert straight.status == 0, straight.output
    forks.run(tmp_path, *SMALL, *options, *AUTO, kill_at="run/lora")
    assert not (tmp_path / "run" / "summary.json").exists() and checkpoint(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "lora")  # the kill may also come before it
    again = forks.run(tmp_path, *SMALL, *options, *AUTO)
    assert again.status == 0, again.output
    assert results(tmp_path / "run") == results(tmp_path / "straight")
    assert results(tmp_path / "run")["iterations"] == 1  # the guard stops it
    assert (tmp_path / "run" / "report.html").is_file()
    assert "nothing to do" in forks.run(tmp_path, *SMALL, *options, *AUTO).output


def test_values_of_hydra_are_those_of_the_job_also_in_a_resume(command: Command, tmp_path: Path) -> None:
    lines = [f"a red {shape} above a blue {other}" for shape in ("circle", "square") for other in ("circle", "square")]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    assert command(*SMALL, "iterations=1", "data.train=${hydra:runtime.cwd}/all.txt", "hydra.run.dir=run").status == 0
    assert command("ckpt=last", "hydra.run.dir=run", "iterations=2").status == 0
    assert summary(tmp_path / "run")["iterations"] == 2


def test_stopped_run_resumes_by_ckpt_last(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = ("callbacks.guard.stop=true", "callbacks.guard.limits.drift=1")
    assert command(*SMALL, *stop, "hydra.run.dir=run").status == 0
    assert summary(tmp_path / "run")["stopped_by"] == "the guard: no_drift"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 3)  # as three: they would wait for each other
        more = command("ckpt=last", "hydra.run.dir=run")
    assert more.status == 0, more.err
    assert "3 threads, where the checkpoint's run had 1: " in more.out
    facts = summary(tmp_path / "run")
    assert (facts["status"], facts["stopped_by"], facts["iterations"]) == ("completed", None, 2)


# Diverged


class NaNGradient(NFT):
    """A finite loss whose gradient is NaN after the trial and, where ``batches`` is below 0, after as many batches."""

    batches = 0

    def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
        loss = super().__call__(velocity, batch, **others)
        type(self).batches += 1
        if type(self).batches <= 1:
            return loss
        return loss._replace(per_sample=loss.per_sample + (0 * velocity.flatten(1).sum(1)).abs().sqrt())


def assert_finite(run: Path, iterations: int) -> None:
    """The last checkpoint is that of ``iterations`` and has no NaN; no LoRA is exported."""
    state = checkpoint(run)
    assert state["loops"]["fit_loop"]["state_dict"]["iterations_done"] == iterations
    averages = state["callbacks"]["WeightEMA"]["average"]
    assert all(value.isfinite().all() for part in (state["state_dict"], averages) for value in part.values())
    assert not (run / "lora").exists()


@pytest.mark.parametrize(("steps", "advice"), [(1, "Lower optimizer.lr"), (0, "The loss is finite and no step has")])
def test_gradient_that_is_not_finite_ends_the_run_before_the_step(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, advice: str
) -> None:
    monkeypatch.setattr(NaNGradient, "batches", -steps)
    done = command(*SMALL, "iterations=3", f"objective._target_={__name__}.NaNGradient", "hydra.run.dir=run")
    assert done.status == 1
    line = the_line(done.err)
    assert f"train/grad_norm is nan. {advice}" in line
    assert summary(tmp_path / "run")["last_checkpoint_iterations"] == (steps or None)
    if steps:
        assert_finite(tmp_path / "run", 1)


def test_weights_that_are_not_finite_do_not_replace_the_checkpoint(command: Command, tmp_path: Path) -> None:
    assert command(*SMALL, "iterations=1", "hydra.run.dir=run").status == 0
    options = ("optimizer.lr=1e30", "iterations=3", "hydra.run.dir=branch")
    done = command("ckpt=run/checkpoints/last.ckpt", *options)
    assert done.status == 1
    assert "weights are not finite after an optimiser step" in the_line(done.err)
    assert not (tmp_path / "branch" / "checkpoints").exists() or not list((tmp_path / "branch").rglob("last.ckpt"))
    assert not (tmp_path / "branch" / "lora").exists()


# Other prompts and rewards


@pytest.fixture
def bright(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options that add the mean of all pixels to the rewards there are."""
    folder = Path(__file__).parents[2] / "dev" / "guard"
    monkeypatch.syspath_prepend(folder)
    return "--config-dir", str(folder)


def test_branch_into_other_rewards_begins_its_evaluations_anew(
    command: Command, tmp_path: Path, bright: tuple[str, ...]
) -> None:
    assert command(*SMALL, *bright, "reward=brightness", "data.eval_prompts=8", "hydra.run.dir=run").status == 0
    options = ("reward=shapes", "iterations=4", "callbacks.guard.stop=true", "hydra.run.dir=branch")
    options += ("optimizer.lr=1e-6",)  # so that the new reward itself does not fall
    done = command(*bright, "ckpt=run/checkpoints/last.ckpt", *options)
    assert done.status == 0, done.err
    facts, before = summary(tmp_path / "branch"), summary(tmp_path / "run")
    assert [row["iteration"] for row in facts["evaluations"]] == [2, 3, 4]
    assert facts["base_reward"] == facts["evaluations"][0][facts["reward"]]
    assert facts["final_reward"] == facts["evaluations"][-1][facts["reward"]]
    assert done.out.count("before training | ") == 1
    assert facts["alarms"] == [] and facts["status"] == "completed"
    assert facts["best_iteration"] in (3, 4)
    assert facts["held_out"]["digest"] != before["held_out"]["digest"]
    # The error of a change is that of these two evaluations.
    scores = [row["shapes"] for row in facts["evaluations"]]
    assert facts["evaluations"][1]["change_error"]["shapes"] < 0.2 * abs(scores[0] - before["final_reward"])


LEVEL = """
from solrl_lightning.rewards.base import Reward

class Level(Reward):
    name = "level"

    def __init__(self, target, device="cpu"):
        super().__init__(device)
        self.target = target

    def score(self, images, prompts):
        return 1 - (images.mean((1, 2, 3)) - self.target).abs()
"""


def test_branch_with_another_argument_of_its_reward_begins_its_evaluations_anew(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "level_reward.py").write_text(LEVEL)
    (tmp_path / "mine" / "reward").mkdir(parents=True)
    member = {"_target_": "level_reward.Level", "target": 0.9, "weight": 1.0}
    (tmp_path / "mine" / "reward" / "level.yaml").write_text(f"# @package reward\nlevel: {json.dumps(member)}\n")
    level = ("--config-dir", "mine", "reward=level")
    assert command(*SMALL, *level, "iterations=1", "hydra.run.dir=run").status == 0
    branch = ("--config-dir", "mine", "ckpt=run/checkpoints/last.ckpt", "iterations=2", "hydra.run.dir=branch")
    done = command(*branch, "reward.level.target=0.2", "callbacks.guard.stop=true")
    assert done.status == 0, done.err
    facts, before = summary(tmp_path / "branch"), summary(tmp_path / "run")
    assert [row["iteration"] for row in facts["evaluations"]] == [1, 2] and facts["alarms"] == []
    assert facts["base_reward"] == facts["evaluations"][0]["level"] < before["final_reward"] - 0.3
    assert facts["held_out"]["rewards"] != before["held_out"]["rewards"]
    compared = command("task=compare", "task.runs='[rb]*'", "hydra.run.dir=compare")
    assert "or by rewards with other weights or arguments" in compared.out


def test_branch_that_samples_otherwise_begins_its_evaluations_anew(command: Command, tmp_path: Path) -> None:
    assert command(*SMALL, "model.eval_steps=2", "hydra.run.dir=run").status == 0
    last = "ckpt=run/checkpoints/last.ckpt"
    branch = command(last, "iterations=3", "model.scheduler={shift:3.0}", "hydra.run.dir=branch")
    assert branch.status == 0 and "the held-out prompts, their sampling, the rewards" in branch.out
    facts, before = summary(tmp_path / "branch"), summary(tmp_path / "run")
    assert facts["base_reward"] == facts["evaluations"][0]["shapes"] != before["final_reward"]
    compared = command("task=compare", "task.runs='[rb]*'", "hydra.run.dir=compare")
    assert "different held-out images" in compared.out
    old = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    del old["sampling"]  # of an older version
    torch.save(old, tmp_path / "run" / "checkpoints" / "last.ckpt")
    same = command(last, "iterations=3", "hydra.run.dir=same")
    assert same.status == 0 and summary(tmp_path / "same")["base_reward"] == before["base_reward"]
    with claimed(tmp_path / "run", new=False):
        busy = command("ckpt=last", "hydra.run.dir=run", "iterations=3")
    assert busy.status == 2 and "run/checkpoints/last.ckpt hydra.run.dir=<folder>.\n" in busy.err


def test_run_that_resumes_with_other_held_out_prompts_begins_its_evaluations_anew(
    command: Command, tmp_path: Path
) -> None:
    done = command(*SMALL, "iterations=1", "hydra.run.dir=run")
    assert done.status == 0, done.err
    before = summary(tmp_path / "run")
    (tmp_path / "others.txt").write_text("\n".join(eval_captions()[8:10]))
    done = command("ckpt=last", "hydra.run.dir=run", "iterations=2", "data.eval=others.txt", "evaluation.every=1")
    assert done.status == 0, done.err
    facts = summary(tmp_path / "run")
    assert [row["iteration"] for row in facts["evaluations"]] == [1, 2]
    assert facts["base_reward"] == facts["evaluations"][0]["shapes"] != before["final_reward"]
    assert facts["best_iteration"] == 2 and "change_error" in facts["evaluations"][1]
    same = command("ckpt=last", "hydra.run.dir=run", "iterations=3")
    assert same.status == 0, same.err
    assert [row["iteration"] for row in summary(tmp_path / "run")["evaluations"]] == [1, 2, 3]


def test_edited_training_prompts_are_an_error_in_the_run_s_folder_only(command: Command, tmp_path: Path) -> None:
    prompts, rows = tmp_path / "prompts.jsonl", [{"prompt": text, "tag": "a"} for text in train_captions()[:3]]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    assert command(*SMALL, f"data.train={prompts}", "iterations=1", "hydra.run.dir=run").status == 0
    before = (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes()
    for edit in ({"prompt": train_captions()[3]}, {"tag": "b"}):
        prompts.write_text("\n".join(map(json.dumps, [*rows[:2], rows[2] | edit])))
        done = command("ckpt=last", "iterations=2", "hydra.run.dir=run")
        assert done.status == 2
        line = the_line(done.err)
        assert f"data.train={prompts} is invalid: " in line and "hydra.run.dir=<folder>" in line
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes() == before
    branch = command("ckpt=run/checkpoints/last.ckpt", "iterations=2", "hydra.run.dir=branch")
    assert branch.status == 0, branch.err
    assert "the training prompts, their metadata or images differ from the checkpoint's" in branch.out


def test_run_that_its_max_seconds_ended_is_complete_and_resumes_with_more(command: Command, tmp_path: Path) -> None:
    options = ("iterations=5", "max_seconds=1e-3", "hydra.run.dir=run")
    printed = command(*SMALL, *options).out
    facts = summary(tmp_path / "run")
    assert (facts["status"], facts["stopped_by"], facts["iterations"]) == ("completed", None, 1)
    assert facts["evaluations"][-1]["iteration"] == 1
    again = command(*SMALL, *options, "ckpt=auto")
    assert again.status == 0 and "has ended after 1 iteration; nothing to do" in again.out
    refused = the_line(command("ckpt=last", "iterations=1", "hydra.run.dir=run").err)
    # A busy machine has taken more than 5 seconds for the iteration.
    assert re.search(r"has done 1 iteration. Raise its length, as in iterations=11 max_seconds=\d\d, or ", refused)
    branch = re.search("state: (.*)[.] Keys", command("ckpt=last", "optimizer.lr=1e-5", "hydra.run.dir=run").err)
    for more in (branch[1] + " hydra.run.dir=branch", re.search("; (ckpt=last .*) trains", printed)[1]):
        done = command(*shlex.split(more))
        assert done.status == 0, done.err
    assert summary(tmp_path / "run")["iterations"] == 2
