"""Measures how well the proxy reward orders candidates, with the BF16 reward as the reference.

On the kept set both rewards are known without extra cost, but its seeds are the extremes of the pool, so the
correlation is biased upwards. A probe is unbiased: it generates the whole pool of this rank's first prompt in BF16.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from solrl_lightning.callbacks.common import log_values, loop_of, module_of, reduced
from solrl_lightning.metrics.rank import RankFidelity
from solrl_lightning.metrics.selection_gain import kept_variance, random_variance
from solrl_lightning.options.rules import CountOrZero


class RankCorrelation(Callback):
    """Logs ``rank/kept_spearman``, ``rank/kept_kendall`` every iteration and the other ``rank/*`` tags at each probe.

    ``time/probe`` is the seconds of a probe (mean over ranks); ``time/iteration`` excludes them. Families of one stage
    have no proxy and log nothing.

    Args:
        probe_every: iterations from one probe to the next, from the first iteration on; 0 never probes.
    """

    def __init__(self, probe_every: CountOrZero) -> None:
        self.probe_every = probe_every
        self.history: list[dict[str, float]] = []  # one row per probe: iteration and the values without "rank/"
        self.last_kept: dict[str, float] = {}
        self._reward: str | None = None  # that ranks; of the checkpoint until training starts
        self._seconds = 0.0  # of the probe

    @property
    def last(self) -> dict[str, float]:
        """Values of the latest probe; empty before the first."""
        return self.history[-1] if self.history else {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reward = module_of(pl_module).rewards.name
        if self._reward not in (None, reward):  # a branch into another reward
            self.history, self.last_kept = [], {}
        self._reward = reward

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # optimizer_step updates the old policy, so the probe must run before the first micro-batch.
        loop, iteration = loop_of(trainer), trainer.current_epoch + 1
        due = self.probe_every > 0 and trainer.current_epoch % self.probe_every == 0
        if loop.explored is None:  # a run that this one branches from may have explored
            self.history, self.last_kept = [], {}
        if batch_idx != 0 or loop.explored is None or not due:
            return
        proxy, seeds, prompts = loop.explored.merits[:1], loop.explored.seeds[:1], list(loop.rollouts.prompts[:1])
        reference = proxy  # [0, N] on a rank without prompts: torchmetrics needs an update on every rank
        before = loop.stopwatch.seconds.get("probe", 0.0)
        with loop.stopwatch.stage("probe"), torch.no_grad():
            if prompts:
                reference = loop.probe(prompts, seeds).merits
        self._seconds = loop.stopwatch.seconds["probe"] - before
        scored = (proxy + reference).isfinite().all(dim=0)  # candidates of the prompt; a reward may leave some out
        if scored.sum() >= loop.keep:
            proxy, reference = proxy[:, scored], reference[:, scored]
        # A checkpoint within an iteration has the probe of that iteration, which is repeated.
        self.history = [row for row in self.history if row["iteration"] < iteration]
        ratio = {"spread_ratio": spread_ratio(trainer, proxy, reference)}
        self.history.append({"iteration": iteration} | fidelity(trainer, proxy, reference) | ratio)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = loop_of(trainer)
        if loop.explored is None:
            return
        merits = module_of(pl_module).rewards.for_training.merits(loop.rollouts.scores)
        values = fidelity(trainer, loop.rollouts.proxy_merits, merits)
        self.last_kept = {f"kept_{name}": values[name] for name in ("spearman", "kendall")}
        log_values(pl_module, {f"rank/{name}": value for name, value in self.last_kept.items()})
        if self.last.get("iteration") == trainer.current_epoch + 1:
            probed = {f"rank/{name}": value for name, value in self.last.items() if name != "iteration"}
            log_values(pl_module, probed | {"time/probe": self._seconds})

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "last_kept": self.last_kept, "reward": self._reward}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = list(state_dict["history"])
        self.last_kept = dict(state_dict.get("last_kept", {}))  # an older version has neither
        self._reward = state_dict.get("reward")


def fidelity(trainer: Trainer, proxy: Tensor, reference: Tensor) -> dict[str, float]:
    """Return ``RankFidelity`` of rewards [P, N] over all ranks; NaN if no prompt has ranks. Collective."""
    device = trainer.strategy.root_device
    metric = RankFidelity(keep=loop_of(trainer).keep).to(device)
    metric.update(proxy.to(device), reference.to(device))
    return {name: float(value) for name, value in metric.compute().items()}


def spread_ratio(trainer: Trainer, proxy: Tensor, reference: Tensor) -> float:
    """Return rho of `metrics/selection_gain.py` for rewards [P, N] of all ranks; NaN without a spread. Collective."""
    keep = loop_of(trainer).keep
    sums = torch.stack([kept_variance(proxy, reference, keep).sum(), random_variance(reference, keep).sum()])
    selected, by_chance = reduced(trainer, sums, "sum")
    return float((selected / by_chance).sqrt())
