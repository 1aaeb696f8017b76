"""Rank correlation of the cheap proxy reward with the BF16 reward.

Two measurements. On the kept set both rewards are known at no cost, but the kept seeds are the extremes of the pool, so
their correlation overestimates the proxy. The probe is unbiased: every few iterations the whole pool of this rank's
first prompt is generated again in BF16, N generations that training does not use.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.callbacks.common import log_values, loop_of
from solrl_lightning.errors import UserError
from solrl_lightning.metrics.rank import NAMES, RankFidelity


class RankCorrelation(Callback):
    """Logs ``rank/kept_spearman``, ``rank/kept_kendall`` every iteration and the other ``rank/*`` tags at each probe.

    ``time/probe`` is a probe's seconds (mean over ranks); ``time/iteration`` leaves them out.
    probe_every: iterations from one probe to the next, the first in the first iteration; 0 never probes.
    Families of one stage have no proxy and log nothing.
    """

    def __init__(self, probe_every: int) -> None:
        if probe_every < 0:
            raise UserError(f"probe_every has to be 0 (never) or a number of iterations, got {probe_every}.")
        self.probe_every = probe_every
        self.history: list[dict[str, float]] = []  # one row per probe: iteration and the values without "rank/"
        self.last_kept: dict[str, float] = {}
        self._probe: RankFidelity | None = None
        self._seconds = 0.0  # of the probe

    @property
    def last(self) -> dict[str, float]:
        """The latest probe's values, empty before the first."""
        return self.history[-1] if self.history else {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Before the first micro-batch: the optimiser step moves the old policy away from the one that explored.
        loop = loop_of(trainer)
        due = self.probe_every > 0 and trainer.current_epoch % self.probe_every == 0
        if batch_idx != 0 or loop.explored is None or not due:
            return
        proxy, seeds, prompts = loop.explored.rewards[:1], loop.explored.seeds[:1], list(loop.rollouts.prompts[:1])
        truth = proxy  # [0, N]: a rank without prompts joins the metric with an empty update
        before = loop.stopwatch.seconds.get("probe", 0.0)
        with loop.stopwatch.stage("probe"), torch.no_grad():
            if prompts:
                truth = loop.regenerate(prompts, seeds).rewards
        self._seconds = loop.stopwatch.seconds["probe"] - before
        self._probe = RankFidelity(keep=loop.rollouts.rewards.shape[1]).to(trainer.strategy.root_device)
        self._probe.update(proxy.to(trainer.strategy.root_device), truth.to(trainer.strategy.root_device))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = loop_of(trainer)
        if loop.explored is None:
            return
        device = trainer.strategy.root_device
        kept = RankFidelity(keep=loop.rollouts.rewards.shape[1]).to(device)
        kept.update(loop.rollouts.proxy_rewards.to(device), loop.rollouts.rewards.to(device))
        values = measured(kept)
        self.last_kept = {"kept_spearman": values["spearman"], "kept_kendall": values["kendall"]}
        log_values(pl_module, {f"rank/{name}": value for name, value in self.last_kept.items()})
        if self._probe is not None:
            probed = measured(self._probe)
            self._probe = None
            log_values(pl_module, {f"rank/{name}": v for name, v in probed.items()} | {"time/probe": self._seconds})
            self.history.append({"iteration": trainer.current_epoch + 1} | probed)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = list(state_dict["history"])


def measured(fidelity: RankFidelity) -> dict[str, float]:
    """The metric over all ranks, as numbers; NaN where no prompt had ranks. Collective."""
    values = fidelity.compute()
    return {name: float(values[name]) for name in NAMES}
