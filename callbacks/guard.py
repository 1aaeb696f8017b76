"""Watches a run for collapse and for exploited rewards, by the rules in ``alarms``.

All ranks have the same history, so with ``stop`` all of them stop after the same iteration.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.artifacts.formatting import counted
from solrl_lightning.callbacks.alarms import METRICS, Alarm, History, Limits, find_alarms, near_constant, reward_fault
from solrl_lightning.callbacks.common import file_logger, loop_of, module_of, moments, reduced
from solrl_lightning.options.rules import Count
from solrl_lightning.training.module import SolRLModule


class Guard(Callback):
    """Raises an alarm when a rule begins to hold. Must follow ``RolloutStats``.

    Args:
        stop: end the run at the first alarm; its result is then checkpoints/best.ckpt.
        patience: consecutive iterations with near-constant or saturated rewards before an alarm.
        limits: the fields of ``alarms.Limits``.
    """

    def __init__(self, stop: bool, patience: Count, limits: Limits) -> None:
        self.stop, self.patience, self.limits = stop, patience, limits
        self.history = History()
        self.alarms: list[Alarm] = []
        self.stopped_by: Alarm | None = None
        self._active: list[str] = []  # names of the alarms that the last iteration had
        self._faulty = 0  # consecutive iterations with rewards that train nothing

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The tables of the run that this one branches from may not compare.
        if not module_of(pl_module).evaluation.comparable:
            self.history = History(self.history.rows)
        if not trainer.should_stop:  # a run that an alarm has ended is trained further
            self.stopped_by = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module, iteration = module_of(pl_module), loop_of(trainer).iterations_done
        if trainer.sanity_checking or module.evaluation.table is None:
            return
        self.history = self.history.until(iteration - 1)
        self.history.evaluated.append(iteration)
        self.history.tables.append(module.evaluation.table.clone())

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A checkpoint within an iteration has the evaluation of that iteration, which is repeated.
        self.history = self.history.until(trainer.current_epoch)
        self.alarms = [alarm for alarm in self.alarms if alarm.iteration <= trainer.current_epoch]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logged, module = trainer.callback_metrics, module_of(pl_module)
        row = {name: float(logged[name]) for name in METRICS if name in logged}
        self.history.rows.append({"iteration": trainer.current_epoch + 1} | row)
        weights = module.rewards.weights
        several = sum(weight != 0 for weight in weights.values()) > 1  # else reward_fell watches it
        watched = {
            name: weight
            for name, weight in weights.items()
            if name != module.rewards.name and (weight == 0 or (weight > 0 and several))
        }
        alarms = find_alarms(self.history, module.evaluation.columns, module.rewards.name, watched, self.limits)
        alarms += self._constant_rewards(trainer, module)
        new = [alarm for alarm in alarms if alarm.name not in self._active]
        self._active = [alarm.name for alarm in alarms]
        self.alarms += new
        for alarm in new if trainer.is_global_zero else ():
            text = f"alarm {alarm.name} after iteration {alarm.iteration}: {alarm.saw}, since iteration {alarm.since}."
            file_logger.warning(text)
            pl_module.print(f"{text}\n  What usually helps: {alarm.helps} (docs/guard.md).")
        if new and self.stop:
            self.stopped_by = new[0]
            trainer.should_stop = True

    def _constant_rewards(self, trainer: Trainer, module: SolRLModule) -> list[Alarm]:
        rollouts = loop_of(trainer).rollouts
        flat, scores = rollouts.rewards.detach().flatten(), rollouts.scores.detach()
        total, informative = moments(trainer, flat), False
        if near_constant(total):  # GDPO compares by each reward in its own unit, whatever one of them adds to the sum
            merits = moments(trainer, module.rewards.for_training.merits(scores).flatten())
            each = [moments(trainer, column) for column in scores.flatten(0, 1).T]
            informative = not near_constant(merits) and not all(map(near_constant, each))
        infinity = flat.new_full((1,), float("inf"))  # a rank without prompts has no rewards for min and max
        lowest = reduced(trainer, torch.cat([flat, infinity]).min(), "min")
        highest = reduced(trainer, torch.cat([flat, -infinity]).max(), "max")
        at_lowest, at_highest = (moments(trainer, flat == extreme.to(flat)).mean for extreme in (lowest, highest))
        fault = reward_fault(total, float(lowest), float(highest), at_lowest, at_highest, informative)
        self._faulty = self._faulty + 1 if fault else 0
        if fault is None or self._faulty < self.patience:
            return []
        (saw, helps), iteration = fault, trainer.current_epoch + 1
        saw = f"in {counted(self._faulty, 'iteration')} in a row, {saw}"
        return [Alarm("rewards_constant", iteration, iteration - self._faulty, saw, helps)]

    def state_dict(self) -> dict[str, Any]:
        alarms = [alarm._asdict() for alarm in self.alarms]
        stopped_by = self.stopped_by and self.stopped_by._asdict()
        state = {"alarms": alarms, "active": self._active, "faulty": self._faulty, "stopped_by": stopped_by}
        return {**vars(self.history), **state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = History(*(list(state_dict[name]) for name in ("rows", "evaluated", "tables")))
        self.alarms = [Alarm(**alarm) for alarm in state_dict["alarms"]]
        self._active, self._faulty = list(state_dict["active"]), state_dict["faulty"]
        stopped_by = state_dict.get("stopped_by")  # an older version has none
        self.stopped_by = stopped_by and Alarm(**stopped_by)
