"""``family``: how the samples to train on are chosen from a pool of candidates."""

from itertools import pairwise
from typing import Any

from solrl_lightning.errors import UserError
from solrl_lightning.names import SolverName
from solrl_lightning.options.rules import HERE, Broken, Compile, Count, Group, Images, Kept, Level, written
from solrl_lightning.rollout.stage import EXPLORE, Sigmas, Stage, level_of, step_at


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


class Exploration(Stage):
    """A cheap way to score the candidates of a pool: a stage, or several that are its rungs."""

    rungs: list[Rung] | None = None
    """Several steps after which candidates are scored and some of them continue."""

    def check(self) -> None:
        if self.stop_after is not None and self.stop_after >= self.steps:
            rule = f"it must be at least 1 and below {HERE}.steps={self.steps}."
            raise Broken(rule, "stop_after", f"Lower it (by default model.prefix_steps) or raise {HERE}.steps.")
        stops = [key for key in ("stop_after", "stop_below", "rungs") if getattr(self, key)]
        if len(stops) > 1:
            first, second, *_ = stops
            rule = f"{HERE}.{first}={getattr(self, first)} stops the same trajectories."
            raise Broken(rule, second, f"Set {HERE}.{first}=null, or {HERE}.{second}=null.")

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
            first, second = max(1, self.steps // 3), max(2, self.steps // 2)
            example = f"[{{step:{first},keep:{max(pool // 2, keep)}}},{{step:{second},keep:{keep}}}]"
            raise Broken(
                f"it must be a list of rungs such as '{HERE}.{key}.rungs={example}', each with a step above the one "
                f"before it, up to {self.steps} (or a noise level, below, under the one before it), and a keep not "
                f"above the one before it, from the pool of {pool} down to {keep} in the last rung.",
                f"{key}.rungs",
                f"Set it so, or leave {HERE}.pool and {HERE}.keep out.",
            )

    def stages(self, key: str, solver: str, keep: int, sigmas: Sigmas, name: str = EXPLORE) -> list[Stage]:
        """Return a stage per rung; without rungs one, which keeps ``keep``.

        ``key``: of this explorer. ``solver``: where it has none. The ``step`` of a rung and the step of a noise level
        are a stage's ``stop_after``; null, or the last of ``steps``, goes to the end of the trajectory. UserError if a
        noise level is the level of the last step, or a rung is not after the one before it.
        """
        steps = self.steps
        stops = [
            (f"rungs.{index}={written(rung.model_dump(exclude_none=True))}", rung.step, rung.below, rung.keep)
            for index, rung in enumerate(self.rungs or ())
        ] or [(f"stop_below={self.stop_below}", self.stop_after, self.stop_below, keep)]
        stages, before = [], 0
        for stop, step, level, kept in stops:
            if level is not None:
                step = min(step_at(level, sigmas(steps)), steps)
            if step is not None and (step <= before or (level is not None and step == steps)):
                first = max(before, 1)
                later = ", ".join(f"{m} ({level_of(m, sigmas(steps))})" for m in range(first + 1, steps))
                raise UserError(
                    f"{key}.{stop} is invalid: it stops at step {step} of {steps}, and must stop after step "
                    f"{first} and before step {steps}. "
                    + (f"Take one of these steps, or its noise level: {later}." if later else f"Raise {key}.steps.")
                )
            before = step or 0
            values = {"name": name, "solver": self.solver or solver, "keep": kept}
            stages.append(self.but(stop_after=None if step == steps else step, stop_below=None, **values))
        return stages


class Regeneration(Stage):
    """The pass that gives the images to train on, which are whole."""

    no_keys = (*Stage.no_keys, "stop_after", "stop_below", "decoder")
    solver: SolverName
    """Solver of the noise levels."""


class Pool(Group):
    """Numbers of candidates of a prompt."""

    pool: Images
    """Candidates of each prompt."""
    keep: Kept
    """Candidates that are trained on: the best and the worst halves; an odd number has one more of the worst."""

    def check(self) -> None:
        if self.keep > self.pool:
            fix = f"Raise {HERE}.pool or lower {HERE}.keep."
            raise Broken(f"it must be at most {HERE}.pool={self.pool}.", "keep", fix)


class Family(Pool):
    explore: Exploration | None
    """The whole pool's pass, for the selection only; null: the pool is sampled once."""
    regenerate: Regeneration
    """The kept candidates' pass."""
    compile: Compile
    """torch.compile of the rollouts: true, false, or auto (on a GPU)."""
    warning: str | None
    """Text that is printed at the start."""

    def check(self) -> None:
        """Raise unless a pass that stops early is one that regeneration with the same weights can continue."""
        super().check()
        last, explorer = self.regenerate, self.explore
        if explorer is None:
            return
        explorer.check_rungs("explore", self.pool, self.keep)
        first, resumed = explorer.but(solver=explorer.solver or last.solver).trajectory, last.trajectory
        others = [key for key in resumed if first[key] != resumed[key]]
        if explorer.stops_early and explorer.sampler == last.sampler and others:
            key, value = f"family.regenerate.{others[0]}", written(first[others[0]])
            raise UserError(
                f"{key}={written(resumed[others[0]])} is invalid: it resumes the trajectories of family.explore, which "
                f"stops early with {others[0]}={value}. Set {key}={value}."
            )
        if not others and explorer.rungs and explorer.rungs[-1].step == explorer.steps:
            rule = f"its last rung ends with step {explorer.steps}, the last one, so no step is left to regenerate."
            fix = f"Set an earlier step there, or raise {HERE}.explore.steps and {HERE}.regenerate.steps."
            raise Broken(rule, "explore.rungs", fix)

    @property
    def exploring_samplers(self) -> set[str]:
        """The name of the sampler that explores, if one does."""
        return set() if self.explore is None else {self.explore.sampler}

    def stages(self, sigmas: Sigmas, solver: Any = None, shared_noise: bool = False) -> list[Stage]:
        """Return the passes over the pool: those that explore, if it does, and the one that regenerates.

        ``solver``: of the last pass, if the objective has its own. ``shared_noise``: of a family that does not explore;
        those that do rank start noises.
        """
        last = self.regenerate.but(solver=solver or self.regenerate.solver)
        if self.explore is None:
            return [last.but(keep=self.keep, shared_noise=shared_noise)]
        return [*self.explore.stages("family.explore", self.regenerate.solver, self.keep, sigmas), last]
