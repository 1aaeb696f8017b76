import json
import re

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from solrl_lightning.callbacks.alarms import Limits
from solrl_lightning.callbacks.checkpoints import BestCheckpoint, PeriodicCheckpoints
from solrl_lightning.callbacks.common import stop_reason
from solrl_lightning.callbacks.ema import WeightEMA
from solrl_lightning.callbacks.export import ExportLoRA
from solrl_lightning.callbacks.guard import Guard
from solrl_lightning.callbacks.rollout_stats import RolloutStats
from solrl_lightning.callbacks.summary import RunSummary
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards

OFF = dict.fromkeys(Limits._fields)


def guarded(tmp_path, stand_in, rewards_of, iterations, guard, prompts="ab") -> list[str]:
    roll_out = stand_in.RollOut(prompts)
    roll_out.rewards_of = rewards_of
    trainer = stand_in.trainer(tmp_path, [RolloutStats(), guard], roll_out, max_epochs=iterations)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    assert {alarm.name for alarm in guard.alarms} <= {"rewards_constant"}
    return [alarm.saw for alarm in guard.alarms]


@pytest.mark.parametrize("value", [0.0, 0.51, -1.7])
def test_nearly_constant_rewards_are_reported_once_with_the_likely_cause(tmp_path, stand_in, capsys, value):
    def constant(seeds):
        return value * (1 + 1e-6 * stand_in.rewards_of(seeds))

    guard = Guard(stop=False, patience=3, limits=OFF)
    (saw,) = guarded(tmp_path, stand_in, constant, 5, guard)
    assert "in 3 iterations in a row, all 8 rewards are nearly equal" in saw
    assert (guard.alarms[0].iteration, guard.alarms[0].since) == (3, 0)
    printed = capsys.readouterr().out
    assert re.search(
        r"^alarm rewards_constant after iteration 3: .*, since iteration 0\.\n  What usually", printed, re.M
    )
    assert "the reward model may not have loaded" in printed


@pytest.mark.parametrize(("extreme", "cause"), [(1.0, "too easy"), (0.0, "black or broken")])
def test_saturated_rewards_are_reported(tmp_path, stand_in, extreme, cause):
    def saturated(seeds):
        rewards = torch.full(seeds.shape, extreme)
        rewards[0, 0] = 0.5
        return rewards

    # One sample is not extreme: with 2 prompts 7 of 8 = 87.5 % are, with 6 prompts 23 of 24 = 95.8 %.
    assert guarded(tmp_path, stand_in, saturated, 3, Guard(False, 2, OFF), prompts="ab") == []
    guard = Guard(False, 2, OFF)
    assert len(guarded(tmp_path, stand_in, saturated, 3, guard, prompts="abcdef")) == 1
    assert cause in guard.alarms[0].helps


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_rewards_that_differ_are_not_reported_at_any_scale(tmp_path, stand_in, scale):
    # PickScore varies by a few percent around its mean.
    def pickscore(seeds):
        return scale * (0.8 + 0.02 * stand_in.rewards_of(seeds))

    assert guarded(tmp_path, stand_in, pickscore, 4, Guard(False, 1, OFF)) == []


def test_guard_counts_consecutive_iterations_and_reports_a_second_time_what_has_ended(tmp_path, stand_in):
    for pattern, reported in (("0101", []), ("001100", [2, 6])):
        faulty = iter(pattern)

        def sometimes(seeds, faulty=faulty):
            return stand_in.rewards_of(seeds) if next(faulty) == "1" else torch.zeros(seeds.shape)

        guard = Guard(False, 2, OFF)
        guarded(tmp_path, stand_in, sometimes, len(pattern), guard)
        assert [alarm.iteration for alarm in guard.alarms] == reported


def test_a_resumed_run_counts_the_iterations_with_constant_rewards_before_it(tmp_path, stand_in):
    def fitted(iterations, ckpt_path=None):
        guard, roll_out = Guard(False, 3, OFF), stand_in.RollOut()
        roll_out.rewards_of = lambda seeds: torch.zeros(seeds.shape)
        trainer = stand_in.trainer(tmp_path, [RolloutStats(), guard], roll_out, max_epochs=iterations)
        trainer.fit(stand_in.Module(), stand_in.micro_batches(), ckpt_path=ckpt_path)
        return trainer, guard

    trainer, begun = fitted(2)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    _, resumed = fitted(4, tmp_path / "x.ckpt")
    assert begun.alarms == []
    assert [(alarm.name, alarm.iteration, alarm.since) for alarm in resumed.alarms] == [("rewards_constant", 3, 0)]


class Falling:
    """Mixin of ``Evaluated``: a held-out reward that rises to 0.6 in iteration 2 and falls to 0.3 in iteration 3."""

    MEANS = (0.4, 0.5, 0.6, 0.3, 0.3)

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        done = self.evaluation.history[-1]["iteration"]
        self.trainer.fit_loop.iterations_done = done
        spread = torch.linspace(-0.1, 0.1, 16, dtype=torch.float64)[:, None]
        self.evaluation.history[-1]["shapes"] = self.MEANS[done]
        rewards = [self.MEANS[done]] * (len(self.evaluation.columns) - 4)
        self.evaluation.table = torch.tensor([[*rewards, 0.5, 0.5, 0.5, 0.5]], dtype=torch.float64) + spread


def run(tmp_path, stand_in, guard, iterations=4, ckpt_path=None, comparable=True, rewards=None):
    module = type("Module", (Falling, stand_in.Evaluated), {})()
    module.rewards = module.evaluation.rewards = rewards or module.rewards
    module.evaluation.comparable = comparable
    trainer = stand_in.trainer(tmp_path, [RolloutStats(), guard], max_epochs=iterations)
    if ckpt_path is None:
        trainer.validate(module, stand_in.micro_batches(), verbose=False)
    trainer.fit(module, stand_in.micro_batches(), stand_in.micro_batches(), ckpt_path=ckpt_path)
    return trainer


LIMITS = OFF | {"fall": 3.0}


def test_with_stop_an_alarm_ends_the_run_after_its_iteration(tmp_path, stand_in):
    guard = Guard(True, 3, LIMITS)
    trainer = run(tmp_path, stand_in, guard)
    assert trainer.current_epoch == 3 and guard.stopped_by == guard.alarms[0]
    assert [(alarm.name, alarm.iteration, alarm.since) for alarm in guard.alarms] == [("reward_fell", 3, 2)]
    straight = Guard(False, 3, LIMITS)
    assert run(tmp_path, stand_in, straight).current_epoch == 4
    assert straight.alarms == guard.alarms and straight.stopped_by is None  # once, though the reward stays low


def test_rewards_of_weight_0_are_watched_and_those_of_negative_weight_are_not(tmp_path, stand_in):
    weights = {"shapes": 1.0, "bright": 0.0, "price": -1.0}
    rewards = WeightedRewards(dict.fromkeys(weights, ShapesReward()), weights)
    guard = Guard(False, 3, LIMITS)
    run(tmp_path, stand_in, guard, rewards=rewards)
    assert [alarm.name for alarm in guard.alarms] == ["reward_fell", "shapes_reward_fell", "bright_reward_fell"]


def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(tmp_path, stand_in):
    straight = Guard(False, 3, LIMITS)
    run(tmp_path, stand_in, straight)
    trainer = run(tmp_path, stand_in, Guard(False, 3, LIMITS), iterations=2)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]["Guard"]["evaluated"] == [0, 1, 2]
    other = Guard(False, 3, LIMITS)
    run(tmp_path, stand_in, other, ckpt_path=tmp_path / "x.ckpt", comparable=False)
    assert other.history.evaluated == [3, 4]  # rewards of other prompts are not compared with those of before
    resumed = Guard(False, 3, LIMITS)
    run(tmp_path, stand_in, resumed, ckpt_path=tmp_path / "x.ckpt")
    assert resumed.alarms == straight.alarms and resumed.history.evaluated == straight.history.evaluated == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert all(map(torch.equal, resumed.history.tables, straight.history.tables))
    assert [row["iteration"] for row in resumed.history.rows] == [1, 2, 3, 4]


def test_a_run_that_the_guard_ends_exports_the_best_weights_and_says_so(tmp_path, stand_in, capsys):
    checkpoints = tmp_path / "checkpoints"
    guard, best = Guard(True, 3, LIMITS), BestCheckpoint(str(checkpoints))
    exported = {}
    module = type("Module", (Falling, stand_in.Evaluated), {})()
    module.save_lora = lambda folder, weights: exported.update(module.ema_state)
    periodic = PeriodicCheckpoints(str(checkpoints), every=1, keep=2)
    summary = RunSummary({"seed": 1}, columns=["seed"])
    callbacks = [WeightEMA(), RolloutStats(), guard, best, periodic, ExportLoRA(), summary]
    trainer = stand_in.trainer(tmp_path, callbacks, max_epochs=4, enable_checkpointing=True)
    trainer.validate(module, stand_in.micro_batches(), verbose=False)
    trainer.fit(module, stand_in.micro_batches(), stand_in.micro_batches())

    names = ["best.ckpt", "iteration_000002.ckpt", "iteration_000003.ckpt"]
    assert sorted(file.name for file in checkpoints.iterdir()) == names
    states = [torch.load(checkpoints / name, weights_only=True)["callbacks"] for name in names]
    assert states[0]["BestCheckpoint"] == {"reward": 0.6, "iteration": 2}
    average, same, later = (state["WeightEMA"]["average"]["lora"] for state in states)
    assert torch.equal(exported["lora"], average) and torch.equal(average, same) and not torch.equal(average, later)

    facts = json.loads((tmp_path / "summary.json").read_text())
    assert (facts["status"], facts["iterations"], facts["stopped_by"]) == ("stopped early", 3, "the guard: reward_fell")
    assert (facts["best_reward"], facts["best_iteration"], facts["best_monitor"]) == (0.6, 2, "shapes")
    assert [(alarm["name"], alarm["iteration"], alarm["since"]) for alarm in facts["alarms"]] == [("reward_fell", 3, 2)]
    printed = capsys.readouterr().out
    assert "by the guard: reward_fell; lora/ is that of the best checkpoint" in printed
    assert re.search(r"best shapes +0\.6000 after 2 iterations; ckpt=best takes it\n", printed)
    assert re.search(
        r"alarm +after iteration 3, since iteration 2: the held-out shapes reward fell from 0.6 to", printed
    )


def test_a_completed_run_exports_the_last_weights(tmp_path, stand_in):
    exported = {}
    module = type("Module", (Falling, stand_in.Evaluated), {})()
    module.save_lora = lambda folder, weights: exported.update(module.ema_state)
    best, average = BestCheckpoint(str(tmp_path)), WeightEMA()
    trainer = stand_in.trainer(tmp_path, [average, best, ExportLoRA()], max_epochs=3, enable_checkpointing=True)
    trainer.fit(module, stand_in.micro_batches(), stand_in.micro_batches())
    assert (best.iteration, average.updates) == (2, 3) and torch.equal(exported["lora"], average.average["lora"])


def test_the_best_checkpoint_is_that_of_the_monitored_reward(tmp_path, stand_in):
    class Monitored(Falling, stand_in.Evaluated):
        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            self.evaluation.history[-1]["bright"] = -self.evaluation.history[-1]["shapes"]

    best = BestCheckpoint(str(tmp_path), monitor="bright")
    trainer = stand_in.trainer(tmp_path, [best], max_epochs=4, enable_checkpointing=True)
    trainer.fit(Monitored(), stand_in.micro_batches(), stand_in.micro_batches())
    assert best.state_dict() == {"reward": -0.3, "iteration": 3}


def test_a_resumed_run_keeps_the_best_checkpoint_and_a_branch_begins_its_own(tmp_path, stand_in):
    def fitted(folder, iterations, ckpt_path=None):
        best = BestCheckpoint(str(tmp_path / folder))
        module = type("Module", (Falling, stand_in.Evaluated), {})()
        trainer = stand_in.trainer(tmp_path, [best], max_epochs=iterations, enable_checkpointing=True)
        trainer.fit(module, stand_in.micro_batches(), stand_in.micro_batches(), ckpt_path=ckpt_path)
        return best.state_dict()

    checkpoint = tmp_path / "run" / "best.ckpt"
    best = {"reward": 0.6, "iteration": 2}
    assert fitted("run", 2) == best
    branched = fitted("branch", 3, checkpoint)
    assert branched == {"reward": 0.3, "iteration": 3} and (tmp_path / "branch" / "best.ckpt").is_file()
    assert fitted("run", 3, checkpoint) == best


def test_early_stopping_is_the_reason_of_a_stop(tmp_path, stand_in):
    class Logged(Falling, stand_in.Evaluated):
        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            self.log("eval/shapes", self.MEANS[self.evaluation.history[-1]["iteration"]])

    stopping = EarlyStopping("eval/shapes", patience=2, mode="max", check_on_train_epoch_end=False)
    trainer = stand_in.trainer(tmp_path, [stopping], max_epochs=4)
    trainer.fit(Logged(), stand_in.micro_batches(), stand_in.micro_batches())
    assert trainer.current_epoch == 4
    assert stop_reason(trainer) == "early stopping: eval/shapes did not improve in 2 evaluations"
