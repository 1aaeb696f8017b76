import json
import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback

from solrl_lightning.callbacks.alarms import Limits
from solrl_lightning.callbacks.checkpoints import BestCheckpoint, PeriodicCheckpoints
from solrl_lightning.callbacks.common import stop_reason
from solrl_lightning.callbacks.ema import WeightEMA
from solrl_lightning.callbacks.export import ExportLoRA
from solrl_lightning.callbacks.guard import Guard
from solrl_lightning.callbacks.rollout_stats import RolloutStats
from solrl_lightning.callbacks.summary import RunSummary
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards, gdpo, weighted_sum

OFF = Limits(fall=None, diversity=None, kl=None, drift=None)


@pytest.fixture
def guarded(fit, stand_in):
    """Trains with rewards that are a function of the seeds, and returns the guard."""

    def guarded(rewards_of, iterations, patience, prompts="ab", resumed=None):
        guard, roll_out = Guard(False, patience, OFF), stand_in.RollOut(prompts, rewards_of=rewards_of)
        guard.trainer = fit(RolloutStats(), guard, roll_out=roll_out, iterations=iterations, resumed=resumed)
        assert {alarm.name for alarm in guard.alarms} <= {"rewards_constant"}
        return guard

    return guarded


@pytest.mark.parametrize("value", [0.0, 0.51, -1.7])
def test_nearly_constant_rewards_are_reported_once_with_the_likely_cause(guarded, stand_in, capsys, value):
    (alarm,) = guarded(lambda seeds: value * (1 + 1e-6 * stand_in.rewards_of(seeds)), 5, patience=3).alarms
    assert "in 3 iterations in a row, all 8 rewards are nearly equal" in alarm.saw
    assert (alarm.iteration, alarm.since) == (3, 0)
    line = r"^alarm rewards_constant after iteration 3: .*, since iteration 0\.\n  What usually helps: .* may not have"
    assert re.search(line, capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("combine", "spread", "constant", "alarms"),
    [(gdpo, 1.0, 2e4, 0), (gdpo, 5e-5, 1.0, 1), (weighted_sum, 1.0, 2e4, 1)],
    ids=["gdpo", "noise", "sum"],
)
def test_with_gdpo_rewards_are_constant_if_each_one_is(fit, stand_in, combine, spread, constant, alarms):
    """A reward that adds 20,000 to all samples hides the others in the sum, and adds 0 to the merits of GDPO."""

    class RollOut(stand_in.RollOut):
        def on_train_epoch_start(self, trainer, pl_module):
            super().on_train_epoch_start(trainer, pl_module)
            rollouts = trainer.fit_loop.rollouts
            scores = torch.stack([1 + spread * rollouts.rewards, torch.full_like(rollouts.rewards, constant)], dim=-1)
            trainer.fit_loop.rollouts = rollouts._replace(scores=scores, rewards=scores.sum(-1))

    module, guard = stand_in.StandIn(), Guard(False, 2, OFF)
    module.rewards = WeightedRewards(dict(a=ShapesReward(), b=Plain()), dict(a=1.0, b=1.0), combine)
    fit(RolloutStats(), guard, module=module, roll_out=RollOut(), iterations=3)
    assert len(guard.alarms) == alarms


class Plain(Reward):
    def score(self, images, prompts):
        return torch.zeros(len(prompts))


@pytest.mark.parametrize(("extreme", "cause"), [(1.0, "too easy"), (0.0, "black or broken")])
def test_saturated_rewards_are_reported(guarded, extreme, cause):
    def saturated(seeds):
        rewards = torch.full(seeds.shape, extreme)
        rewards[0, 0] = 0.5
        return rewards

    # One sample is not extreme: with 2 prompts 7 of 8 = 87.5 % are, with 6 prompts 23 of 24 = 95.8 %.
    assert guarded(saturated, 3, patience=2).alarms == []
    (alarm,) = guarded(saturated, 3, patience=2, prompts="abcdef").alarms
    assert cause in alarm.helps


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_rewards_that_differ_are_not_reported_at_any_scale(guarded, stand_in, scale):
    # PickScore varies by a few percent around its mean.
    assert guarded(lambda seeds: scale * (0.8 + 0.02 * stand_in.rewards_of(seeds)), 2, patience=1).alarms == []


def test_guard_counts_consecutive_iterations_and_reports_a_second_time_what_has_ended(guarded, stand_in):
    for pattern, reported in (("0101", []), ("001100", [2, 6])):
        faulty = iter(pattern)

        def sometimes(seeds, faulty=faulty):
            return stand_in.rewards_of(seeds) if next(faulty) == "1" else torch.zeros(seeds.shape)

        guard = guarded(sometimes, len(pattern), patience=2)
        assert [alarm.iteration for alarm in guard.alarms] == reported


def test_a_resumed_run_counts_the_iterations_with_constant_rewards_before_it(guarded):
    def zero(seeds):
        return torch.zeros(seeds.shape)

    first = guarded(zero, 2, patience=3)
    assert first.alarms == []
    (alarm,) = guarded(zero, 4, patience=3, resumed=first.trainer).alarms
    assert alarm[:3] == ("rewards_constant", 3, 0)


LIMITS = OFF | {"fall": 3.0}


@pytest.fixture
def run(fit, stand_in):
    def run(stop=False, iterations=4, comparable=True, rewards=None, resumed=None):
        guard, module = Guard(stop, 3, LIMITS), stand_in.Falling()
        module.rewards = module.evaluation.rewards = rewards or module.rewards
        module.evaluation.comparable = comparable
        guard.trainer = fit(RolloutStats(), guard, module=module, iterations=iterations, resumed=resumed)
        return guard

    return run


def test_with_stop_an_alarm_ends_the_run_after_its_iteration(run):
    guard, straight = run(stop=True), run()
    assert guard.trainer.current_epoch == 3 and guard.stopped_by == guard.alarms[0]
    assert [alarm[:3] for alarm in guard.alarms] == [("reward_fell", 3, 2)]
    assert straight.trainer.current_epoch == 4
    assert straight.alarms == guard.alarms and straight.stopped_by is None  # once, though the reward stays low


def test_rewards_of_weight_0_are_watched_and_those_of_negative_weight_are_not(run):
    weights = {"shapes": 1.0, "bright": 0.0, "price": -1.0}
    guard = run(rewards=WeightedRewards(dict.fromkeys(weights, ShapesReward()), weights))
    assert [alarm.name for alarm in guard.alarms] == ["reward_fell", "shapes_reward_fell", "bright_reward_fell"]
    del weights["price"]  # the trained reward is the reward shapes then, and is watched once
    guard = run(rewards=WeightedRewards(dict.fromkeys(weights, ShapesReward()), weights))
    assert [alarm.name for alarm in guard.alarms] == ["reward_fell", "bright_reward_fell"]


def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(run):
    straight, first = run(), run(iterations=2)
    assert first.history.evaluated == [0, 1, 2]
    # Rewards of other prompts are not compared with those of before.
    assert run(resumed=first.trainer, comparable=False).history.evaluated == [3, 4]
    resumed = run(resumed=first.trainer)
    assert resumed.alarms == straight.alarms
    assert resumed.history.evaluated == straight.history.evaluated == [0, 1, 2, 3, 4]
    assert all(map(torch.equal, resumed.history.tables, straight.history.tables))
    assert [row["iteration"] for row in resumed.history.rows] == [1, 2, 3, 4]


def test_a_repeated_iteration_replaces_its_row_its_evaluation_and_its_alarm(stand_in):
    guard, module = Guard(False, 3, LIMITS), stand_in.Falling()
    tables = [torch.full((2, 3), float(number)) for number in range(3)]
    rows = [{"iteration": number} for number in (1, 2, 3)]
    alarms = [{"name": "no_drift", "iteration": number, "since": 0, "saw": "", "helps": ""} for number in (2, 3)]
    state = {"rows": rows, "evaluated": [0, 2, 3], "tables": tables, "alarms": alarms, "active": [], "faulty": 0}
    guard.load_state_dict(state)
    module.evaluation.table = torch.ones(2, 3)
    loop = SimpleNamespace(iterations_done=3)
    guard.on_validation_end(SimpleNamespace(sanity_checking=False, fit_loop=loop), module)
    assert guard.history.evaluated == [0, 2, 3] and torch.equal(guard.history.tables[-1], torch.ones(2, 3))
    guard.load_state_dict(state)
    guard.on_train_epoch_start(SimpleNamespace(current_epoch=2), module)
    assert guard.history.rows == rows[:2] and guard.history.evaluated == [0, 2] and len(guard.history.tables) == 2
    assert [alarm.iteration for alarm in guard.alarms] == [2]


def test_a_run_that_an_alarm_has_ended_is_trained_further_without_that_reason(run):
    stopped = run(stop=True)
    assert stopped.stopped_by is not None and run(iterations=4, resumed=stopped.trainer).stopped_by is None


def test_a_run_without_an_average_that_the_guard_ends_exports_the_best_weights(tmp_path, fit, stand_in):
    module, best, weights = stand_in.Falling(), BestCheckpoint(str(tmp_path)), [torch.zeros(2)]
    keep = LambdaCallback(on_train_epoch_end=lambda _, module: weights.append(module.weight.detach().clone()))
    options = dict(module=module, iterations=4, enable_checkpointing=True)
    fit(RolloutStats(), Guard(True, 3, LIMITS), best, keep, ExportLoRA(), **options)
    assert best.iteration == 2 and torch.equal(module.exported, weights[2]) and not torch.equal(weights[3], weights[2])


def test_a_run_that_the_guard_ends_exports_the_best_weights_and_says_so(tmp_path, fit, stand_in, capsys):
    checkpoints, module = tmp_path / "checkpoints", stand_in.Falling()
    best, periodic = BestCheckpoint(str(checkpoints)), PeriodicCheckpoints(str(checkpoints), every=1, keep=2)
    callbacks = WeightEMA(), RolloutStats(), Guard(True, 3, LIMITS), best, periodic, ExportLoRA()
    fit(*callbacks, RunSummary({"seed": 1}), module=module, iterations=4, enable_checkpointing=True)

    names = ["best.ckpt", "iteration_000002.ckpt", "iteration_000003.ckpt"]
    assert sorted(file.name for file in checkpoints.iterdir()) == names
    states = [torch.load(checkpoints / name, weights_only=True)["callbacks"] for name in names]
    assert states[0]["BestCheckpoint"] == {"reward": 0.6, "iteration": 2}
    average, same, later = (state["WeightEMA"]["average"]["lora"] for state in states)
    assert torch.equal(module.exported, average) and torch.equal(average, same) and not torch.equal(average, later)

    facts = json.loads((tmp_path / "summary.json").read_text())
    assert (facts["status"], facts["iterations"], facts["stopped_by"]) == ("stopped early", 3, "the guard: reward_fell")
    assert (facts["best_reward"], facts["best_iteration"], facts["best_monitor"]) == (0.6, 2, "shapes")
    assert [(alarm["name"], alarm["iteration"], alarm["since"]) for alarm in facts["alarms"]] == [("reward_fell", 3, 2)]
    printed = capsys.readouterr().out
    assert "by the guard: reward_fell; lora/ has the weights of the best checkpoint" in printed
    branch = re.escape(f"ckpt={tmp_path}/checkpoints/best.ckpt branches from it\n")
    assert re.search(rf"best shapes +0\.6000 after iteration 2; {branch}", printed)
    assert re.search(r"alarm +after iteration 3, since iteration 2: the held-out shapes reward fell from 0.6", printed)


@pytest.mark.parametrize(
    ("options", "epochs", "reason"),
    [
        (dict(patience=2), 4, "did not improve in 2 evaluations"),
        (dict(stopping_threshold=0.1), 1, "reached 0.1"),
        (dict(divergence_threshold=0.5), 3, "became worse than 0.5"),
    ],
)
def test_early_stopping_is_the_reason_of_a_stop(fit, stand_in, options, epochs, reason):
    stopping = EarlyStopping("eval/shapes", mode="max", check_on_train_epoch_end=False, **options)
    trainer = fit(stopping, module=stand_in.Falling(), iterations=4)
    assert trainer.current_epoch == epochs
    assert stop_reason(trainer) == f"early stopping: eval/shapes {reason}"
    later = EarlyStopping("eval/shapes", mode="max", check_on_train_epoch_end=False)
    later.load_state_dict(stopping.state_dict() | {"patience": 99, "stopped_epoch": stopping.stopped_epoch - 1})
    trainer.callbacks[trainer.callbacks.index(stopping)] = later  # of a run that has trained on
    assert trainer.should_stop and stop_reason(trainer) is None
