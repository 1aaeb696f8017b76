"""Groups of finished runs with equal configurations but for the seed and keys that only observe or place a run."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf

from solrl_lightning.artifacts.finished_runs import RECORDED_CONFIG, Run
from solrl_lightning.artifacts.run_folder import RECORD
from solrl_lightning.cli.resume import is_subkey, leaves
from solrl_lightning.names import AUTO, BACKENDS
from solrl_lightning.study.time_to_reward import GroupCurve

COSTS = ("iteration", "seconds", "evaluations")
"""Keys of an evaluation's row that measure what was spent until then."""

# Keys, with those below them, in which runs of one experiment may differ.
_SAME_EXPERIMENT = (
    "seed objective.seed ckpt run_dir task callbacks logger evaluation trainer.accelerator trainer.devices "
    "trainer.num_nodes trainer.strategy trainer.default_root_dir trainer.check_val_every_n_epoch"
).split()


class Group(NamedTuple):
    """Finished runs that differ in their seed only, one per seed."""

    words: tuple[str, ...]  # key=value of what distinguishes it; chosen options before single values
    usual: tuple[str, ...]  # further words that most groups have
    label: str  # the words in short, unique
    runs: list[Run]
    settings: dict[str, Any]  # what differs between the groups, followers of other keys included
    curves: dict[str, GroupCurve]  # by cost; without those that no run has recorded

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def finals(self) -> dict[Any, float]:
        """Seed -> final held-out reward."""
        return {run.seed: run.summary["final_reward"] for run in self.runs}


class Settings(NamedTuple):
    """The configuration that identifies an experiment: dotted key -> value."""

    options: dict[str, Any]  # config group -> the option chosen of it
    written: dict[str, Any]  # with interpolations as they are
    resolved: dict[str, Any]
    given: set[str]  # keys on the command line of the run


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], dict[str, str]]:
    """Groups in the order of their first run, and runs that a later one of the same group and seed replaces."""
    settings = [read_settings(run) for run in runs]
    members: dict[str, dict[Any, Run]] = {}
    distinct: dict[str, Settings] = {}
    superseded = {}
    for run, own in zip(runs, settings, strict=True):
        identity = json.dumps(own.resolved, sort_keys=True)
        distinct.setdefault(identity, own)
        earlier = members.setdefault(identity, {}).get(run.seed)
        if earlier is not None and (earlier.summary["status"], run.summary["status"]) == ("completed", "stopped early"):
            reason = f"stopped early; {earlier.folder} has the same configuration and seed and completed"
            superseded[run.folder] = reason
            continue
        if earlier is not None:
            superseded[earlier.folder] = f"{run.folder} is a later run of the same configuration and seed"
        members[identity][run.seed] = run
    differing = _differing([s.resolved for s in settings])
    full = {identity: words_of(own, settings, differing) for identity, own in distinct.items()}
    words = without_usual(full)
    groups = []
    for identity, own in distinct.items():
        usual = tuple(word for word in full[identity] if word not in words[identity])
        label = " ".join(_short(word, own.options) for word in words[identity])
        shown = {key: own.resolved.get(key) for key in differing}
        group = list(members[identity].values())
        groups.append(Group(words[identity], usual, label, group, shown, group_curves(group)))
    if len({group.label for group in groups}) < len(groups):
        groups = [group._replace(label=group.name) for group in groups]
    return groups, superseded


def read_settings(run: Run) -> Settings:
    cfg = OmegaConf.load(Path(run.folder) / RECORDED_CONFIG)
    assert isinstance(cfg, DictConfig)
    cfg.run_dir = run.folder
    for group in ("callbacks", "logger"):  # their interpolations need Hydra
        cfg.pop(group, None)
    written, resolved = (leaves(OmegaConf.to_container(cfg, resolve=resolve)) for resolve in (False, True))
    keys = [key for key in resolved if not is_subkey(key, *_SAME_EXPERIMENT)]
    groups = {key.partition(".")[0] for key in keys if "." in key}
    options = {key: value for key, value in run.summary["config"].items() if key in groups}
    values = {key: written.get(key) for key in keys}, {key: _plain(resolved[key]) for key in keys}
    chosen = run.summary.get("precision_backend", "").partition(" ")[0]  # "no" without a shadow
    if values[1].get("precision.name") == AUTO and chosen in BACKENDS:
        options["precision"] = values[1]["precision.name"] = chosen
    overrides = Path(run.folder) / RECORD / "overrides.yaml"
    arguments = yaml.safe_load(overrides.read_text()) if overrides.is_file() else []
    return Settings(options, *values, {str(argument).partition("=")[0].lstrip("+~") for argument in arguments})


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 1.0 and 1 are one setting


def words_of(own: Settings, settings: Sequence[Settings], differing: Sequence[str]) -> tuple[str, ...]:
    """Return what distinguishes a group: chosen options, then single values; the family if it is the only group.

    A value distinguishes it if the runs with the same option of its config group differ in it, and if it does not
    follow another key by interpolation. A value of no config group that was not on the command line follows the option
    that sets it if the runs with the same option of some group agree in it.
    """
    options = _differing([s.options for s in settings])

    def distinguishes(key: str) -> bool:
        group = key.partition(".")[0]
        follows = group not in own.options and not any(key in s.given for s in settings)
        for option in options if follows else [group]:
            alike = [s for s in settings if s.options.get(option) == own.options.get(option)]
            if not (_differs(key, [s.written for s in alike]) and _differs(key, [s.resolved for s in alike])):
                return False
        return True

    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in (own.options | own.resolved).items()}
    keys = [*options, *filter(distinguishes, differing)] or ["family"]
    return tuple(f"{key}={values[key]}" for key in keys if key in values)


def _differing(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ, in the order of their first appearance."""
    return [key for key in dict.fromkeys(key for own in mappings for key in own) if _differs(key, mappings)]


def _differs(key: str, mappings: Sequence[Mapping[str, Any]]) -> bool:
    return len({json.dumps(mapping.get(key), sort_keys=True) for mapping in mappings}) > 1


def without_usual(words: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the words of each group without those after the first that more than half of the groups have."""
    number = Counter(word for own in words.values() for word in own)
    fewer = {
        group: (*own[:1], *(word for word in own[1:] if number[word] <= len(words) / 2)) for group, own in words.items()
    }
    return fewer if len(set(fewer.values())) == len(fewer) else dict(words)


def _short(word: str, options: Mapping[str, Any]) -> str:
    key, _, value = word.partition("=")
    return value if key in options else f"{key.rpartition('.')[2]}={value}"


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
            means = [fmean(spent[iteration] for _, _, spent in known) for iteration in common]
            rewards = [{seed: curve[iteration] for seed, curve, _ in known} for iteration in common]
            curves[cost] = GroupCurve(means, rewards)
    return curves
