"""Warns when the kept samples' rewards are nearly constant or saturated.

1. Near-constant: the standard deviation is at most 1e-4 of the rewards' root mean square, for any scale of the reward.
2. Saturated: at least 95 % of the samples have exactly the highest or the lowest reward of the iteration.

A single hard prompt can have only zeros, so the guard warns after several such iterations in a row. It stops no run.
"""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from solrl_lightning.callbacks.common import Moments, loop_of, moments, reduced
from solrl_lightning.errors import UserError

_NEAR_CONSTANT = 1e-4  # std / root mean square; real rewards have 1e-2 and more, float32 noise of equal images 1e-7
_SATURATED = 0.95  # share of samples on one extreme value


def find_fault(kept: Moments, lowest: float, highest: float, at_lowest: float, at_highest: float) -> str | None:
    """Description of the fault of an iteration's rewards with its likely cause, or None.

    ``at_lowest`` and ``at_highest`` are the shares of samples with exactly the lowest and the highest reward.
    """
    if kept.samples < 2:
        return None
    root_mean_square = (kept.mean**2 + kept.std**2) ** 0.5
    if kept.std <= _NEAR_CONSTANT * root_mean_square:
        return (
            f"all {kept.samples} rewards are nearly equal (mean {kept.mean:.6g}, std {kept.std:.2g}). Likely causes: "
            "the reward model did not load (random weights; check reward.pretrained), or all images are black or alike "
            "(look into samples/)"
        )
    if at_highest >= _SATURATED:
        return (
            f"{at_highest:.0%} of {kept.samples} rewards are exactly the highest value, {highest:.6g}. Likely cause: "
            "the prompts are too easy for this reward; use harder prompts or another reward"
        )
    if at_lowest >= _SATURATED:
        return (
            f"{at_lowest:.0%} of {kept.samples} rewards are exactly the lowest value, {lowest:.6g}. Likely causes: "
            "the images are black or broken (look into samples/), or the reward model did not load"
        )
    return None


class RewardGuard(Callback):
    """Warns once when rewards are near-constant or saturated in ``patience`` consecutive iterations.

    Raises:
        UserError: ``patience`` is less than 1.
    """

    def __init__(self, patience: int = 3) -> None:
        if patience < 1:
            raise UserError(
                f"callbacks.reward_guard.patience={patience} is invalid: it must be at least 1 iteration. Set "
                "callbacks.reward_guard.patience=3."
            )
        self.patience = patience
        self._faulty = 0  # consecutive iterations with a fault
        self._warned = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rewards = loop_of(trainer).rollouts.rewards.detach()
        flat = rewards.flatten()
        infinity = flat.new_full((1,), float("inf"))  # a rank without prompts has no rewards for min and max
        lowest = reduced(trainer, torch.cat([flat, infinity]).min(), "min")
        highest = reduced(trainer, torch.cat([flat, -infinity]).max(), "max")
        at_lowest, at_highest = (moments(trainer, flat == extreme.to(flat)).mean for extreme in (lowest, highest))
        fault = find_fault(moments(trainer, flat), float(lowest), float(highest), at_lowest, at_highest)

        self._faulty = self._faulty + 1 if fault else 0
        if fault and self._faulty >= self.patience and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"In {self._faulty} consecutive iterations up to iteration {trainer.current_epoch + 1}, {fault}."
            )
