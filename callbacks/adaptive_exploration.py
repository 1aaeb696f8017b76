"""Moves the exploration between levels, from cheap to expensive, by the probes of ``RankCorrelation``.

A level is the number of an explorer: sampler, steps, and the step where it stops. It is a function of the recorded
probes, which the checkpoint holds, so a resumed run has the same levels.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.callbacks.common import file_logger, find_callback, log_values, loop_of
from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.rollout.stage import Stage, steps_label


class Rule(NamedTuple):
    threshold: float  # a probe below it moves one level up
    margin: float  # above the threshold
    patience: int  # probes in a row of at least threshold + margin that move one level down


def next_level(level: int, fidelities: Sequence[float], levels: int, rule: Rule) -> int:
    """The level after the probes ``fidelities`` of ``level`` since the last move, oldest first.

    NaN, the correlation of equal rewards, moves neither up nor down.
    """
    if fidelities and fidelities[-1] < rule.threshold:
        return min(level + 1, levels - 1)
    recent = fidelities[-rule.patience :]
    if len(recent) == rule.patience and all(value >= rule.threshold + rule.margin for value in recent):
        return max(level - 1, 0)
    return level


class AdaptiveExploration(Callback):
    """Sets ``loop.stages`` to one of ``loop.levels``, and logs ``explore/level``. Must follow ``RankCorrelation``.

    Args:
        start: index of the first level.
    """

    def __init__(self, start: int, rule: Rule) -> None:
        self.start, self.rule = start, rule
        self.levels: Sequence[list[Stage]] = ()  # the stages of each level, from cheap to expensive
        self.probes: list[dict[str, Any]] = []  # iteration, level and spearman of each

    @property
    def level(self) -> int:
        """The level after all probes; only those of one level since the last move count."""
        if not self.probes:
            return self.start
        level = min(self.probes[-1]["level"], len(self.levels) - 1)  # a branched run may have fewer levels
        latest = takewhile(lambda probe: probe["level"] == level, reversed(self.probes))
        return next_level(level, [probe["spearman"] for probe in latest][::-1], len(self.levels), self.rule)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.levels = loop_of(trainer).levels

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A checkpoint within an iteration has the probe of that iteration, which is repeated.
        self.probes = [probe for probe in self.probes if probe["iteration"] <= trainer.current_epoch]
        loop_of(trainer).stages = self.levels[self.level]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        ranks, iteration = find_callback(trainer, RankCorrelation), trainer.current_epoch + 1
        if batch_idx != 0 or ranks is None or ranks.last.get("iteration") != iteration:
            return
        before, spearman = self.level, ranks.last["spearman"]
        self.probes.append({"iteration": iteration, "level": before, "spearman": spearman})
        if self.level != before and trainer.is_global_zero:
            old, new = (
                f"level {level} ({self.levels[level][0].sampler}, {steps_label(self.levels[level][:-1])})"
                for level in (before, self.level)
            )
            message = f"iteration {iteration}: spearman {spearman:.3f} moves the exploration from {old} to {new}"
            file_logger.info(message)
            pl_module.print(message)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log_values(pl_module, {"explore/level": self.levels.index(loop_of(trainer).stages)})

    def state_dict(self) -> dict[str, Any]:
        return {"probes": self.probes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.probes = list(state_dict["probes"])
