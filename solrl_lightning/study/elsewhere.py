"""What the runs of task=compare would cost on another machine: ``task.cost``.

Either factors of the measured seconds of stages, or a packaged table of a model and a GPU: its seconds times the counts
of a run's own configuration, all on one GPU. The curves by iteration stay as measured; the seconds are simulated.
"""

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import Any, NamedTuple

import yaml

from solrl_lightning.artifacts.finished_runs import Run
from solrl_lightning.errors import UserError
from solrl_lightning.options.rules import written
from solrl_lightning.study.run_groups import SIMULATED, Group, costs, resolved_config
from solrl_lightning.training.stopwatch import STOPWATCH_STAGES

_EXAMPLE = "Use task.cost=flux1_h100 or 'task.cost={explore: 0.25}'."


class Machine(NamedTuple):
    """Seconds of one GPU."""

    bf16: float  # forward pass: forward pass of the transformer for one image
    shadow: float  # the same in low precision
    image: float  # decoded and scored
    row: float  # trained: a sample at one noise level
    source: str

    def seconds(self, counts: Mapping[str, float]) -> float:
        """Return the seconds of the ``counts`` of units."""
        return sum(count * getattr(self, unit) for unit, count in counts.items())


def _machine(source: str, rows: int, explore: float, regenerate: float, images: float, train: float) -> Machine:
    """Return the units of an iteration of ``family=sol_rl`` with 6 prompts, from its seconds a stage.

    96 candidates in 6 steps of the shadow, 24 in 10 steps of BF16, all decoded and scored, ``rows`` trained.
    """
    return Machine(regenerate / (6 * 24 * 10), explore / (6 * 96 * 6), images / (6 * (96 + 24)), train / rows, source)


_FORMATS = {"h100": "H100 with an FP8 shadow", "b200": "B200 with an NVFP4 shadow"}


def _tables() -> dict[str, Machine]:
    tables = {}
    file = files("solrl_lightning") / "assets" / "seconds.yaml"
    for model, of_model in yaml.safe_load(file.read_text(encoding="utf-8")).items():
        rows, (rollout, train) = of_model["rows"], of_model["paper"]
        for gpu, name in _FORMATS.items():
            tables[f"{model}_{gpu}"] = _machine(f"{model} on a {name}, estimates +-30 %", rows, *of_model[gpu])
        parts = of_model["b200"][:-1]
        explore, regenerate, images = (part * rollout / sum(parts) for part in parts)
        source = f"{model} on a B200 as the paper measured it, its rollout split by estimates +-30 %"
        tables[f"{model}_paper"] = _machine(source, rows, explore, regenerate, images, train)
    return tables


TABLES = _tables()
"""Packaged tables by name."""

GPUS = {9: "h100", 10: "b200"}
"""The end of a table's name, by the GPU's major compute capability."""


def table_of(pretrained: str, resolution: int, capability: tuple[int, int]) -> Machine | None:
    """Return the packaged estimates of a model, a hub id or a folder of the same name, on a GPU, if there are any."""
    for name in {name.partition("_")[0] for name in TABLES}:
        file = files("solrl_lightning.conf") / "model" / f"{name}.yaml"
        model = yaml.safe_load(file.read_text(encoding="utf-8"))
        known = PurePath(model["pretrained"]).name, model["resolution"]
        if known == (PurePath(pretrained).name, resolution) and capability[0] in GPUS:
            return TABLES[f"{name}_{GPUS[capability[0]]}"]
    return None


class Cost(NamedTuple):
    """``task.cost``, checked."""

    key: str  # as on the command line
    factors: dict[str, float]  # of the seconds of stages
    machine: Machine | None = None

    @property
    def note(self) -> str:
        if self.machine is not None:
            source = f"counts of each run's configuration on one GPU, {self.machine.source} ({self.key})"
        else:
            source = "measured seconds with " + ", ".join(f"{name} x {by:g}" for name, by in self.factors.items())
        return f"iterations are measured, seconds are simulated: {source}"


def read_cost(cost: Any) -> Cost:
    """Check ``task.cost``. UserError if it is neither the name of a table nor factors of at least 0 by stage."""
    key = f"task.cost={written(cost)}"
    if isinstance(cost, str) and cost in TABLES:
        return Cost(key, {}, TABLES[cost])
    factors = cost if isinstance(cost, dict) and cost.keys() <= set(STOPWATCH_STAGES) else {}
    if not factors or not all(type(by) in (int, float) and math.isfinite(by) and by >= 0 for by in factors.values()):
        raise UserError(
            f"{key} is invalid: it must be the name of a table ({', '.join(TABLES)}) or finite factors of at least 0 "
            f"of the stages {', '.join(STOPWATCH_STAGES)}. {_EXAMPLE}"
        )
    return Cost(key, factors)


def with_simulated(runs: Sequence[Run], cost: Cost) -> list[Run]:
    """Return the runs whose evaluations have the seconds elsewhere, too, under ``SIMULATED``.

    Raises:
        UserError: a run has not recorded the seconds of its stages, or its configuration does not have the counts.
    """
    changed = []
    for run in runs:
        evaluations = run.summary["evaluations"]
        if cost.machine is not None:
            each = cost.machine.seconds(counts(run))
            spent = {row["iteration"]: each * row["iteration"] for row in evaluations}
        else:
            ratio = _ratio(run, cost)
            spent = {iteration: ratio * seconds for iteration, seconds in costs(run, "seconds").items()}
        rows = [row | {SIMULATED: spent[row["iteration"]]} if row["iteration"] in spent else row for row in evaluations]
        changed.append(run._replace(summary=run.summary | {"evaluations": rows}))
    return changed


def _ratio(run: Run, cost: Cost) -> float:
    """Return the seconds of the run's iterations with the factors over those without."""
    stages = {stage: (run.summary["seconds_per_stage"].get(stage) or {}).get("total") for stage in STOPWATCH_STAGES}
    measured = {stage: seconds for stage, seconds in stages.items() if seconds}
    if not measured or not costs(run, "seconds"):
        raise UserError(
            f"{cost.key} is invalid: {run.folder} has not recorded the seconds of its stages. Leave it out of "
            "task.runs."
        )
    changed = sum(cost.factors.get(stage, 1) * seconds for stage, seconds in measured.items())
    return changed / sum(measured.values())


def counts(run: Run) -> dict[str, float]:
    """Return the units of `Machine` in an iteration of a run, by its recorded configuration.

    Raises:
        UserError: it explores down to noise levels, whose steps only the model has.
    """
    # These import diffusers.
    from solrl_lightning.names import SHADOW
    from solrl_lightning.objectives.base import Objective
    from solrl_lightning.options.family import Family
    from solrl_lightning.options.rules import UNCHECKED
    from solrl_lightning.policies.guidance import forward_passes
    from solrl_lightning.rollout.stage import candidates_per_prompt, velocities_per_prompt
    from solrl_lightning.targets import make

    def sigmas(steps: int) -> Any:
        raise UserError(
            f"task.cost is invalid: {run.folder} explores down to noise levels, whose steps its configuration lacks. "
            f"{_EXAMPLE}"
        )

    config = resolved_config(run)
    family, objective = Family.model_validate(config["family"], context=UNCHECKED), config["objective"]
    stages = family.stages(sigmas)
    prompts, passes = config["prompts_per_iteration"], forward_passes(config["model"].get("guidance_scale", 1))
    cheap = run.summary.get("precision_backend", "").partition(" ")[0] != "bf16"
    totals = {"bf16": 0, "shadow": 0}
    for stage, number in zip(stages, velocities_per_prompt(stages, family.pool), strict=True):
        totals["shadow" if stage.sampler == SHADOW and cheap else "bf16"] += prompts * passes * number
    rows = make("objective", objective, kind=Objective).rows_per_sample(stages[-1].steps)
    images = sum(candidates_per_prompt(stages, family.pool))
    return {**totals, "image": prompts * images, "row": prompts * family.keep * rows}


def simulated_iteration(group: Group) -> float | None:
    """Return the simulated seconds of an iteration of a group, the mean of its runs."""
    curve, iterations = group.curves.get(SIMULATED), group.curves["iteration"].cost
    return curve and (curve.cost[-1] - curve.cost[0]) / max(1, iterations[-1] - iterations[0])
