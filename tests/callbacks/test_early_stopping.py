import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import callbacks

from solrl_lightning.callbacks.early_stopping import EarlyStopping
from solrl_lightning.errors import UserError
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards


def test_resumed_run_has_the_patience_of_its_options():
    before, after = EarlyStopping("eval/shapes", patience=1), EarlyStopping("eval/shapes", patience=3)
    before.wait_count = 1
    assert before.state_key == callbacks.EarlyStopping("eval/shapes").state_key  # of the checkpoints of older versions
    after.load_state_dict(before.state_dict())
    assert (after.patience, after.wait_count) == (3, 1)


def test_metric_that_no_evaluation_has_is_an_error_before_training():
    state = SimpleNamespace(fn="validate")
    trainer = SimpleNamespace(callback_metrics={"eval/shapes": 0.5}, state=state, sanity_checking=False)
    EarlyStopping("eval/shapes", check_on_train_epoch_end=False).on_validation_end(trainer, None)
    EarlyStopping("train/loss", check_on_train_epoch_end=True).on_validation_end(trainer, None)
    message = "monitor=eval/shape is invalid: it must be a metric of evaluations. Did you mean eval/shapes. They are"
    with pytest.raises(UserError, match=message):
        EarlyStopping("eval/shape", check_on_train_epoch_end=False).on_validation_end(trainer, None)


def test_metric_that_no_reward_has_is_an_error_before_the_evaluation(fit, stand_in):
    def stop_on(monitor):
        return EarlyStopping(monitor, patience=9, check_on_train_epoch_end=False)

    fit(stop_on("eval/shapes"), iterations=1)
    module, message = stand_in.Falling(), "Did you mean eval/shapes. They are eval/shapes"
    with pytest.raises(UserError, match=message):
        fit(stop_on("eval/shape"), module=module, iterations=1)
    assert not module.evaluation.history


@pytest.mark.parametrize(("mode", "warnings"), [("max", 1), ("min", 0)])
def test_more_of_a_reward_of_negative_weight_is_no_improvement_without_a_word(fit, stand_in, caplog, mode, warnings):
    module = stand_in.Falling()
    rewards = {"shapes": ShapesReward(), "bright": Plain()}
    module.rewards = module.evaluation.rewards = WeightedRewards(rewards, {"shapes": 1.0, "bright": -1.0})
    stopping = EarlyStopping("eval/bright", mode=mode, patience=9, check_on_train_epoch_end=True)
    fit(stopping, LogBright(), module=module, iterations=2)
    assert caplog.text.count("less of bright is better, by its weight: callbacks.early_stopping.mode=min") == warnings


class Plain(Reward):
    def score(self, images, prompts):
        return torch.zeros(len(prompts))


class LogBright(callbacks.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("eval/bright", 0.5)


@pytest.mark.parametrize(("mode", "best"), [("max", -math.inf), ("min", math.inf)])
def test_a_branch_counts_from_its_own_first_evaluation(tmp_path, mode, best):
    strategy = SimpleNamespace(broadcast=lambda value: value)
    trainer = SimpleNamespace(default_root_dir=str(tmp_path), strategy=strategy)
    last, stopping = tmp_path / "checkpoints" / "last.ckpt", EarlyStopping("eval/shapes", mode=mode)
    last.parent.mkdir()
    last.touch()
    stopping.wait_count, stopping.best_score = 2, torch.tensor(0.5)
    stopping.on_train_start(trainer, None)
    assert (stopping.wait_count, float(stopping.best_score)) == (2, 0.5)
    last.unlink()
    stopping.on_train_start(trainer, None)
    assert (stopping.wait_count, float(stopping.best_score)) == (0, best)
