"""``family``: how the samples to train on are chosen from a pool of candidates."""

from itertools import pairwise
from typing import Any

from pydantic import model_validator

from solrl_lightning.errors import UserError
from solrl_lightning.names import Decoder, Sampler, SolverName
from solrl_lightning.options.rules import (
    HERE,
    Broken,
    Compile,
    Count,
    Group,
    Images,
    Kept,
    Level,
)
from solrl_lightning.options.rules import Steps as StepCount


class Rung(Group):
    step: Count | None = None
    """Solver steps before the candidates are scored."""
    below: Level | None = None
    """Instead of ``step``: the highest noise level from which the images to score are predicted."""
    keep: Count
    """Number of candidates that continue: the best and the worst halves."""

    def check(self) -> None:
        if (self.step is None) == (self.below is None):
            rule = "it must have a step or below, a noise level, and not both."
            raise Broken(rule, fix=f"For example {{step:4,keep:{self.keep}}} or {{below:0.7,keep:{self.keep}}}.")


class Explorer(Group):
    """A cheap way to score the candidates of a pool."""

    sampler: Sampler
    """Weights that sample."""
    steps: StepCount
    """Solver steps of the whole trajectory."""
    solver: SolverName | None = None
    """The run's, if there is none."""
    stop_after: Count | None = None
    """Steps after which the predicted image is scored; the last one if null."""
    stop_below: Level | None = None
    """Instead of ``stop_after``: the highest noise level from which the image to score is predicted."""
    rungs: list[Rung] | None = None
    """Several steps after which candidates are scored and some of them continue."""
    decoder: Decoder = "full"
    """Decoder of the images to score."""

    def check(self) -> None:
        if self.stop_after is not None and self.stop_after >= self.steps:
            raise Broken(f"it must be at least 1 and below {HERE}.steps={self.steps}.", "stop_after")
        if self.stop_after is not None and self.stop_below is not None:
            rule = f"{HERE}.stop_after={self.stop_after} stops the same trajectories."
            raise Broken(rule, "stop_below", f"Set {HERE}.stop_after=null.")

    @property
    def stops_early(self) -> bool:
        """Whether predicted images are scored, after some of the steps or at rungs."""
        return bool(self.rungs) or self.stop_after is not None or self.stop_below is not None

    def check_rungs(self, key: str, pool: int, keep: int) -> None:
        """Raise unless each rung is later and keeps no more than the one before, from ``pool`` to ``keep``."""
        if self.rungs is None:
            return
        steps = [0, *(rung.step for rung in self.rungs if rung.step is not None)]
        levels = [1.0, *(rung.below for rung in self.rungs if rung.below is not None)]
        keeps = [pool, *(rung.keep for rung in self.rungs)]
        later = all(a < b for a, b in pairwise(steps)) and all(a > b for a, b in pairwise(levels))
        fewer = all(a >= b for a, b in pairwise(keeps))
        if not later or not fewer or not self.rungs or steps[-1] > self.steps or keeps[-1] != keep:
            raise Broken(
                f"it must be a list of rungs such as '{HERE}.{key}.rungs=[{{step:2,keep:{max(pool // 2, keep)}}},"
                f"{{step:4,keep:{keep}}}]', each with a step above the one before it, up to {self.steps} (or a noise "
                f"level, below, under the one before it), and a keep not above the one before it, from the pool of "
                f"{pool} down to {keep} in the last rung.",
                f"{key}.rungs",
                f"Set it so, or leave {HERE}.pool and {HERE}.keep out.",
            )


class Regeneration(Group):
    """The pass that gives the images to train on."""

    sampler: Sampler
    """Weights that sample."""
    steps: StepCount
    """Solver steps."""
    solver: SolverName
    """Solver of the noise levels."""

    @model_validator(mode="before")
    @classmethod
    def check_whole(cls, node: Any) -> Any:
        for key in ("stop_after", "stop_below", "rungs", "decoder") if isinstance(node, dict) else ():
            if key in node:
                rule = "these samples are whole and their rewards train the policy."
                raise Broken(rule, key, f"Set family.explore.{key}.")
        return node


class Pool(Group):
    """Numbers of candidates of a prompt."""

    pool: Images
    """Candidates of each prompt."""
    keep: Kept
    """Candidates that are trained on: the best and the worst halves."""

    def check(self) -> None:
        if self.keep > self.pool:
            fix = f"Raise {HERE}.pool or lower {HERE}.keep."
            raise Broken(f"it must be at most {HERE}.pool={self.pool}.", "keep", fix)


class Family(Pool):
    explore: Explorer | None
    """The whole pool's pass, for the selection only; null: the pool is sampled once."""
    regenerate: Regeneration
    """The kept candidates' pass."""
    compile: Compile
    """torch.compile of the rollouts; auto: on a GPU."""
    warning: str | None
    """Text that is printed at the start."""
    smoke_keep: Kept | None = None
    """``keep`` in experiment=smoke."""

    def check(self) -> None:
        """Raise unless a pass that stops early is one that regeneration with the same weights can continue."""
        super().check()
        last, explorer = self.regenerate, self.explore
        if explorer is None:
            return
        explorer.check_rungs("explore", self.pool, self.keep)
        first = explorer.sampler, explorer.steps, explorer.solver or last.solver
        same = first == (last.sampler, last.steps, last.solver)
        if explorer.stops_early and explorer.sampler == last.sampler and not same:
            raise UserError(
                f"family.regenerate={last.sampler}, {last.steps}, {last.solver} is invalid: it samples with the same "
                f"weights as family.explore ({', '.join(map(str, first))}), which stops early, so it continues the "
                "same trajectories and must have the same steps and solver. Set family.regenerate.steps and .solver so."
            )
        if same and explorer.rungs and explorer.rungs[-1].step == explorer.steps:
            rule = f"it must be a race that ends before step {explorer.steps}, the last one."
            raise Broken(rule, "explore.rungs")
