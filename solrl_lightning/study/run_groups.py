"""Groups of finished runs with equal configurations but for the seed and keys that only observe or place a run."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from solrl_lightning.artifacts.finished_runs import RECORDED_CONFIG, RECORDED_OVERRIDES, Run
from solrl_lightning.cli.config import as_written, is_subkey
from solrl_lightning.cli.console import first_lines
from solrl_lightning.cli.resume import digest, leaves, read_record, recorded_digests
from solrl_lightning.errors import UserError
from solrl_lightning.names import AUTO, BACKENDS
from solrl_lightning.study.time_to_reward import GroupCurve, Plateau, plateau

SIMULATED = "simulated_seconds"
COSTS = ("iteration", "seconds", SIMULATED, "evaluations")
"""Keys of an evaluation's row that measure what was spent until then; ``SIMULATED`` with ``task.cost`` only."""

# Callbacks that change neither what is trained nor what is evaluated.
_WATCHING = (
    "timings requantize rollout_stats rank_correlation guard sample_grid progress best periodic checkpoint export "
    "history summary"
).split()
# Keys, with the keys below them, in which runs of one experiment may differ.
_SAME_EXPERIMENT = (
    *"seed objective.seed ckpt run_dir task logger evaluation trainer.accelerator trainer.devices".split(),
    *"trainer.num_nodes trainer.strategy trainer.default_root_dir trainer.check_val_every_n_epoch".split(),
    *(f"callbacks.{name}" for name in _WATCHING),
)


class Group(NamedTuple):
    """Finished runs that differ in their seed only, one per seed."""

    name: str  # the overrides in which it differs from the other groups
    runs: list[Run]
    settings: dict[str, Any]  # what differs between the groups, followers of other keys included
    curves: dict[str, GroupCurve]  # by cost; without those that no run has recorded

    @property
    def finals(self) -> dict[Any, float]:
        """Seed -> final held-out reward."""
        return {run.seed: run.summary["final_reward"] for run in self.runs}

    @property
    def plateaus(self) -> dict[Any, Plateau]:
        """Seed -> plateau by the seconds of the run, or by its iterations where it has not recorded them."""
        return {
            run.seed: plateau(
                [*(costs(run, "seconds") or costs(run, "iteration")).values()], [*learning_curve(run).values()]
            )
            for run in self.runs
        }


class Settings(NamedTuple):
    """What identifies an experiment, without the keys that only observe or place a run."""

    values: dict[str, Any]  # dotted key -> resolved value
    options: dict[str, Any]  # config group -> the option chosen of it
    overrides: dict[str, str]  # key -> value as on the command line, in its order

    def value(self, key: str) -> str:
        """Return the override of a key or, if it has none, its value."""
        value = self.options.get(key, self.values.get(key))
        return self.overrides.get(key, value if isinstance(value, str) else json.dumps(value))


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], dict[str, str]]:
    """Return groups in the order of their first run, and why each other run is left out.

    A run is left out if a later one of the same group and seed replaces it, or if its configuration cannot be read.
    UserError if no run is left.
    """
    members: dict[str, dict[Any, Run]] = {}
    settings: dict[str, Settings] = {}
    left_out = {}
    for run in runs:
        try:
            of_run = read_settings(run)
        except InterpolationResolutionError as error:  # of an environment variable
            left_out[run.folder] = first_lines(error).rstrip(".")
            continue
        identity = json.dumps(of_run.values, sort_keys=True)
        settings.setdefault(identity, of_run)
        other = members.setdefault(identity, {}).get(run.seed, run)
        earlier, kept = sorted((other, run), key=_ended)
        if (earlier.summary["status"], kept.summary["status"]) == ("completed", "stopped early"):
            left_out[kept.folder] = f"stopped early; {earlier.folder} has the same configuration and seed and completed"
            kept = earlier
        elif other is not run:
            left_out[earlier.folder] = f"{kept.folder} is a later run of the same configuration and seed"
        members[identity][run.seed] = kept
    if not settings:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in left_out.items())
        raise UserError(f"the configuration of none of these runs can be read: {reasons}.")
    names, differing = group_names([*settings.values()]), _differing([s.values for s in settings.values()])
    groups = []
    for name, (identity, of_group) in zip(names, settings.items(), strict=True):
        group = list(members[identity].values())
        groups.append(Group(name, group, {key: of_group.values.get(key) for key in differing}, group_curves(group)))
    return groups, left_out


def _ended(run: Run) -> int:
    """Return the time at which the summary of a run was written, in nanoseconds."""
    return (Path(run.folder) / "summary.json").stat().st_mtime_ns


def read_settings(run: Run) -> Settings:
    resolved, callbacks = _read_config(run)
    at_start = recorded_digests(Path(run.folder))  # of values of the environment, which is another one now
    values = {
        key: value if key not in at_start or at_start[key] == digest(value) else f"<digest {at_start[key][:8]}>"
        for key, value in leaves(resolved | {"callbacks": callbacks}).items()
    }
    values = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value  # 1.0 and 1 are one setting
        for key, value in values.items()
        if not is_subkey(key, *_SAME_EXPERIMENT)
    }
    values |= {f"{key}.digest": content[:8] for key, content in run.summary.get("digests", {}).items()}
    groups = {key.partition(".")[0] for key in values if "." in key}
    options = {key: value for key, value in run.summary["config"].items() if key in groups}
    backend = run.summary.get("precision_backend", "").partition(" ")[0]  # "no" without a shadow
    if values.get("precision.name") == AUTO and backend in BACKENDS:
        options["precision"] = values["precision.name"] = backend
    recorded = read_record(Path(run.folder) / RECORDED_OVERRIDES, ListConfig)
    pairs = [argument.lstrip("+~").partition("=") for argument in as_written(recorded)]
    overrides = {
        key: value
        for key, _, value in pairs  # the value of an interpolation differs with the key that it names
        if not is_subkey(key, *_SAME_EXPERIMENT) and "${" not in value.replace("\\", "")
    }
    return Settings(values, options, overrides)


def resolved_config(run: Run) -> dict[str, Any]:
    """Return the recorded configuration of a run, without callbacks and loggers."""
    return _read_config(run)[0]


def _read_config(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `resolved_config` does, and the callbacks as written: their interpolations need Hydra."""
    cfg = read_record(Path(run.folder) / RECORDED_CONFIG, DictConfig, "seed")
    cfg.run_dir = run.folder
    cfg.pop("logger", None)  # whose interpolations need Hydra, too
    callbacks: Any = OmegaConf.to_container(cfg.pop("callbacks", None) or OmegaConf.create({}), resolve=False)
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    return dict(resolved), callbacks


def group_names(settings: Sequence[Settings]) -> list[str]:
    """Return the overrides in which each group differs from the others, in the order given.

    A group without any has the values of the keys that the others override. Groups that still have one name differ in
    what no command line says: they have these options and values, too. A single group has the name of its family.
    """
    effective = [s.overrides | s.values | s.options for s in settings]
    keys = [key for key in _differing(effective) if any(key in s.overrides for s in settings)]
    names = [" ".join(f"{key}={text}" for key, text in s.overrides.items() if key in keys) for s in settings]
    options, values = _differing([s.options for s in settings]), _differing([s.values for s in settings])
    for candidates in (keys, [*keys, *options], [*keys, *options, *values], ["family"]):
        columns: dict[tuple[str, ...], str] = {}
        for key in candidates:  # but not one with the values of an earlier one, as trainer.max_epochs
            columns.setdefault(tuple(s.value(key) for s in settings), key)
        number = Counter(names)
        names = [
            name if name and number[name] == 1 else " ".join(f"{key}={s.value(key)}" for key in columns.values())
            for name, s in zip(names, settings, strict=True)
        ]
    return names


def _differing(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ, in the order of their first appearance."""
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    return [key for key in keys if len({json.dumps(mapping.get(key), sort_keys=True) for mapping in mappings}) > 1]


def learning_curve(run: Run) -> dict[int, float]:
    """Return iteration -> held-out reward."""
    reward = run.summary["reward"]
    return {row["iteration"]: row[reward] for row in run.summary["evaluations"] if row.get(reward) is not None}


def costs(run: Run, cost: str) -> dict[int, float]:
    """Return iteration -> cost of the evaluations in the learning curve; empty unless all of them have it.

    A run that an older version began counts its cost from its resume, and its first evaluations have none.
    """
    curve = learning_curve(run)
    spent = {row["iteration"]: row.get(cost) for row in run.summary["evaluations"] if row["iteration"] in curve}
    return {} if None in spent.values() else spent


def group_curves(runs: Sequence[Run]) -> dict[str, GroupCurve]:
    """Return the curve against each cost, at the evaluations that all runs with this cost have, one run per seed."""
    curves = {}
    for cost in COSTS:
        known = [(run.seed, learning_curve(run), spent) for run in runs if (spent := costs(run, cost))]
        common = sorted(set.intersection(*(set(spent) for _, _, spent in known))) if known else []
        if common:
            spendings = [{seed: spent[iteration] for seed, _, spent in known} for iteration in common]
            rewards = [{seed: curve[iteration] for seed, curve, _ in known} for iteration in common]
            curves[cost] = GroupCurve(spendings, rewards)
    return curves
