"""Checks of a command line, before anything heavy is imported and before anything is written.

Hydra composes; this file says what is wrong with the result, and in which words. It knows names (groups, options, keys)
and values (counts, fractions, choices); folders and checkpoints are in ``run_folder``.
"""

import difflib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra import compose, initialize_config_module
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from solrl_lightning.data.sources import check_source
from solrl_lightning.errors import UserError
from solrl_lightning.policies.config_files import config_folder

if TYPE_CHECKING:
    from solrl_lightning.data.prompts import PromptSets

CONFIG_MODULE = "solrl_lightning.conf"

_OWN = "command-line"  # Hydra's name for the source that --config-dir adds

SAMPLERS = ("shadow", "merged", "policy")
SOLVERS = ("euler", "dpm2")
DECODERS = ("full", "preview")

# Whole numbers of at least 1.
_COUNTS = (
    "trainer.num_nodes",
    "iterations",
    "prompts_per_iteration",
    "family.pool",
    "family.explore.steps",
    "family.regenerate.steps",
    "model.resolution",
    "model.max_sequence_length",
    "model.full_steps",
    "model.preview_steps",
    "model.eval_steps",
    "model.prefix_steps",
    "model.micro_batch",
    "model.decode_batch",
    "model.rollout_batch",
    "model.lora.rank",
    "data.eval_images",
    "evaluation.every",
    "task.pool",
    "task.images",
    "task.repeats",
    "task.rounds",
    "task.grid_prompts",
    "task.grid_images",
    "task.vae_steps",
    "task.vae_batch",
    "task.flow_steps",
    "task.flow_batch",
    "task.preview_steps",
    "task.preview_batch",
)
# The same, or null.
_OPTIONAL_COUNTS = ("data.eval_prompts", "task.sizes.pool")
# Numbers above 0, or null.
_OPTIONAL_POSITIVE = ("task.tflops", "task.speedup")
# Numbers above 0.
_POSITIVE = (
    "model.max_grad_norm",
    "model.lora.alpha",
    "objective.beta",
    "objective.advantage_clip",
    "objective.ratio_clip",
    "optimizer.lr",
    "task.vae_lr",
    "task.flow_lr",
    "task.preview_lr",
)
# Numbers of at least 0.
_NON_NEGATIVE = ("model.guidance", "objective.kl_weight", "objective.old_weight", "optimizer.weight_decay")
# Shares, in (0, 1].
_FRACTIONS = ("model.train_timestep_fraction", "task.distractors")
_KEEP_RULE = "a whole number of at least 2: the best and the worst of a prompt are compared with each other"
_STRATEGIES = ("auto", "single_device", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")
_ONE_STEP = "an iteration takes one optimiser step on the gradients of all its micro-batches"
# Options of Lightning's Trainer that would change or cut short an iteration: key below `trainer`, the values that do
# not, the rule, and the way out. All others do here what Lightning documents.
_TRAINER = (
    (
        "precision",
        ("None", "32", "32-true"),
        "every dtype is set in the code and Lightning casts nothing",
        "Leave it at trainer.precision=32-true.",
    ),
    (
        "strategy",
        _STRATEGIES,
        f"every rank holds the whole policy, so it must be one of {', '.join(_STRATEGIES)}",
        "Use trainer.strategy=ddp.",
    ),
    (
        "accumulate_grad_batches",
        ("1",),
        f"{_ONE_STEP}; their number follows from model.micro_batch",
        "Leave it out, or set model.micro_batch=<rows>.",
    ),
    ("limit_train_batches", ("None", "1.0"), _ONE_STEP, "Leave it out."),  # 1 would be one batch, 1.0 is all of them
    ("overfit_batches", ("0", "0.0"), _ONE_STEP, "Leave it out."),
    ("fast_dev_run", ("False", "0"), _ONE_STEP, "Use experiment=smoke to run everything once."),
    (
        "limit_val_batches",
        ("None", "0", "0.0", "1", "1.0"),
        "an evaluation is one batch, which is run (1) or not (0)",
        "Set data.eval_prompts=<n> for a shorter evaluation.",
    ),
    (
        "val_check_interval",
        ("None", "1.0"),
        "weights change once per iteration, so evaluations are counted in iterations",
        "Set evaluation.every=<iterations>.",
    ),
    (
        "max_time",
        ("None",),
        "it would stop within an iteration, before its optimiser step",
        "Stop after one: "
        """'+callbacks.timer={_target_:lightning.pytorch.callbacks.Timer,duration:"00:12:00:00",interval:epoch}'.""",
    ),
)
# What makes checkpoints/last.ckpt the newest state: key below callbacks.checkpoint, values, and Lightning's default.
_CHECKPOINT = (
    ("filename", ("last",), None),
    ("monitor", ("None",), None),
    ("save_top_k", ("1",), 1),
    ("save_last", ("None", "False"), None),
    ("save_weights_only", ("False",), False),
    ("enable_version_counter", ("False",), True),
)
_PROXY_KEYS = {"sampler", "steps", "precision", "solver", "stop_after", "rungs", "decoder"}
_SEEDS = 2**32  # noise has so many seeds
_ABSENT = object()  # a key that the chosen options do not have: nothing to check


class _OwnOptions(SearchPathPlugin):
    """Adds folders of the user's own to the places where an opened `ConfigTree` finds options."""

    sources: ClassVar[tuple[str, ...]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for source in self.sources:
            search_path.append(_OWN, source)


class ConfigTree:
    """The configuration tree of the package and of the folders of ``--config-dir`` and ``hydra.searchpath``.

    A context manager that restores Hydra's global state on exit.
    """

    def __init__(self, config_name: str | None = None, config_dir: str | None = None) -> None:
        self.config_name = config_name or "config"
        self.sweeps = False
        Plugins.instance().register(_OwnOptions)
        self._context = initialize_config_module(CONFIG_MODULE, version_base="1.3")
        if config_dir:
            self.look_in([f"file://{Path(config_dir).resolve()}"])

    def __enter__(self) -> "ConfigTree":
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _OwnOptions.sources = ()
        self._context.__exit__(*error)

    @property
    def loader(self) -> ConfigLoader:
        return GlobalHydra.instance().config_loader()

    @property
    def own_sources(self) -> tuple[str, ...]:
        """Where else than in the package options are looked up."""
        return _OwnOptions.sources

    def look_in(self, sources: Iterable[str]) -> None:
        """Looks up options in more places, written as in ``hydra.searchpath``: ``file://<folder>``."""
        _OwnOptions.sources += tuple(sources)
        GlobalHydra.instance().clear()
        initialize_config_module(CONFIG_MODULE, version_base="1.3")

    def groups(self) -> list[str]:
        return [g for g in self.loader.get_group_options("", ObjectType.GROUP) if g != "hydra"]

    def options(self, group: str) -> list[str]:
        return self.loader.get_group_options(group, ObjectType.CONFIG)

    def parse(self, arguments: Iterable[str]) -> list[Override]:
        """The overrides of a command line. UserError for what is none."""
        parser = OverridesParser.create(config_loader=self.loader)
        overrides = []
        for argument in arguments:
            try:
                overrides += parser.parse_overrides([argument])
            except OverrideParseException as error:
                raise UserError(self._unreadable(argument)) from error
            if not overrides[-1].key_or_group:
                raise UserError(self._unreadable(argument))
        return overrides

    def _unreadable(self, argument: str) -> str:
        key, equals, value = argument.partition("=")
        if not equals:
            homes = [f"{group}={argument}" for group in self.groups() if argument in self.options(group)]
            return f"Cannot read {argument!r}: an option is written key=value.{_did_you_mean(homes)}"
        if not argument.isprintable():
            return f"Cannot read {argument!r}: it has characters that cannot be printed. Leave them out."
        quoted = value.strip("'\"")
        return (
            f"Cannot read {argument!r}. Values with spaces, commas, brackets or = need quotes that survive the shell: "
            f"""'{key}="{quoted}"'."""
        )

    def compose(self, arguments: Sequence[str]) -> DictConfig:
        """Everything, Hydra's own part included.

        Raises:
            UserError: for an option or a key that does not exist. Other faults are left to Hydra's own errors.
        """
        try:
            return compose(self.config_name, list(arguments), return_hydra_config=True)
        except (HydraException, ValueError):
            check_names(self, arguments)
            raise

    def jobs(self, arguments: Sequence[str], multirun: bool) -> list[DictConfig]:
        """What `compose` gives for every run that a command line asks for; of a sweep, for every combination.

        Only Hydra's basic sweeper names its combinations; of another one, the first values that it may choose stand for
        all, and every job checks its own (``__main__.run``).
        """
        overrides = self.parse(arguments)
        if any(override.key_or_group == "run_dir" for override in overrides):
            raise UserError("run_dir follows from the folder of the run; set that with hydra.run.dir=<folder>.")
        swept = [override for override in overrides if override.is_sweep_override()]
        cfg = self.compose([str(override.input_line) for override in overrides if not override.is_sweep_override()])
        self.sweeps = multirun or cfg.hydra.mode == RunMode.MULTIRUN
        if not self.sweeps:
            if swept:
                raise UserError(f"{swept[0].input_line} gives several values: add -m for a run of each.")
            check_root(cfg, overrides)
            return [cfg]
        params = self.parse(f"{key}={value}" for key, value in (cfg.hydra.sweeper.get("params") or {}).items())
        basic = cfg.hydra.runtime.choices["hydra/sweeper"] == "basic"
        values = {o.get_key_element(): _swept_values(o, every=basic) for o in params + overrides}
        combinations = itertools.product(*values.values())
        jobs = [self.compose(combination) for combination in combinations]
        if not jobs:
            raise UserError(f"A sweep needs at least one run; {' '.join(str(o.input_line) for o in swept)} names none.")
        for job in jobs:
            check_root(job, params + overrides)
        return jobs


def _swept_values(override: Override, every: bool) -> list[str]:
    """The arguments that a sweep makes of ``override``: one for ``every`` value, or for the first value alone."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    value = override.value()
    if not every:
        first = value.start if isinstance(value, IntervalSweep) else next(override.sweep_string_iterator())
        return [f"{override.get_key_element()}={first}"]
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line} has no list of values: Hydra's basic sweeper cannot go through it.")
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def application_config(cfg: DictConfig, run_dir: str | Path) -> DictConfig:
    """What a task gets of ``ConfigTree.compose``: without Hydra's own part, every value resolved for ``run_dir``."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(cfg)
    try:
        cfg = cfg.copy()
        with open_dict(cfg):
            cfg.run_dir = str(run_dir)
            del cfg["hydra"]
        OmegaConf.resolve(cfg)
        OmegaConf.to_container(cfg, throw_on_missing=True)
    finally:
        HydraConfig.instance().cfg = before
    return cfg


# Names


def check_names(tree: ConfigTree, arguments: Sequence[str]) -> None:
    """UserError for an option that its group does not have, or a key that the chosen options do not have."""
    overrides = tree.parse(arguments)
    choices, values = [], []
    for override in overrides:
        if tree.options(override.key_or_group) and not isinstance(override.value(), dict):
            _check_option(tree, override)
            choices.append(str(override.input_line))
        else:
            values.append(override)
    if not values:
        return
    known = OmegaConf.to_container(tree.compose(choices), resolve=False)
    assert isinstance(known, dict)
    for override in values:
        plain = not (override.is_add() or override.is_force_add() or override.is_delete())
        if plain and not _has(known, override.key_or_group.split(".")):
            raise UserError(_unknown_key(override.key_or_group, known, tree.groups()))


def _check_option(tree: ConfigTree, override: Override) -> None:
    group, value = override.key_or_group, override.value()
    for option in value if isinstance(value, list) else [value]:
        options = tree.options(group)
        if option is None and not override.is_delete():
            raise UserError(f"null is no {group}: leave the group out with ~{group}, or take {' or '.join(options)}.")
        if option is None or str(option) in options:
            continue
        raise UserError(
            f"There is no {group} named {option!r}.{_did_you_mean(_nearest(str(option), options), prefix=f'{group}=')}"
            f" The options are {', '.join(options)}."
        )


def check_root(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """UserError for a key at the root that nothing reads, which ``+`` or a file of the user's own has added."""
    root = _root()
    for key in map(str, cfg):
        if key in root:
            continue
        given = [o.input_line for o in overrides if o.key_or_group.replace("/", ".").partition(".")[0] == key]
        culprit = " ".join(map(str, given)) or f"the key {key} in a file of your own"
        if key == "experiment":
            raise UserError(f"{culprit} is invalid: an experiment's file must begin with `# @package _global_`.")
        known = OmegaConf.to_container(OmegaConf.masked_copy(cfg, list(root - {"hydra"})), resolve=False)
        raise UserError(
            f"{culprit} is invalid: {key} is neither a group nor a key of the configuration, so nothing reads it."
            f"{_did_you_mean(_nearest(key, list(_paths(known))))} --help lists both, --cfg job shows all keys."
        )


@cache
def _root() -> frozenset[str]:
    """The keys at the root of the package's configuration, groups among them."""
    root: Any = OmegaConf.to_container(OmegaConf.create((files(CONFIG_MODULE) / "config.yaml").read_text()))
    groups = {group for entry in root.pop("defaults") if isinstance(entry, dict) for group in entry}
    return frozenset({*root, *groups} - {"experiment", "override hydra/help"})


def _has(tree: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if isinstance(tree, dict) and key in tree:
            tree = tree[key]
        elif isinstance(tree, list) and key.isdigit() and int(key) < len(tree):
            tree = tree[int(key)]
        else:
            return False
    return True


def _paths(tree: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if not str(key).startswith("_"):
                yield f"{prefix}{key}"
                yield from _paths(value, f"{prefix}{key}.")


def _unknown_key(key: str, known: dict[Any, Any], groups: list[str]) -> str:
    parts = key.split(".")
    for parent in itertools.accumulate(parts[:-1], lambda left, right: f"{left}.{right}"):
        if _has(known, parent.split(".")) and OmegaConf.select(OmegaConf.create(known), parent) is None:
            return f"There is no key {key} here: {parent} is null in the chosen {parts[0]}, so nothing lies below it."
    application = {name: value for name, value in known.items() if name != "hydra"}
    names = _paths(known["hydra"], "hydra.") if parts[0] == "hydra" else itertools.chain(_paths(application), groups)
    suggestion = _did_you_mean(_nearest(key, list(names)))
    target = OmegaConf.select(OmegaConf.create(known), f"{key.rpartition('.')[0]}._target_") if "." in key else None
    adding = f" Write +{key}=<value> if {target} takes it." if target and parts[0] != "task" else ""
    return f"There is no key {key}.{suggestion}{adding} --help lists the common ones, --cfg job shows all."


def _nearest(word: str, known: Sequence[str]) -> list[str]:
    """Up to three of ``known``, nearest first; of a dotted key, the whole or the last part alone may be near."""

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, word, candidate).ratio()
        last = difflib.SequenceMatcher(None, word.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.9 * last) + 0.1 * whole - 0.04 * candidate.count(".")

    scored = sorted(((likeness(candidate), candidate) for candidate in dict.fromkeys(known)), reverse=True)
    return [candidate for score, candidate in scored[:3] if score > max(0.65, scored[0][0] - 0.1)]


def _did_you_mean(names: Sequence[str], prefix: str = "") -> str:
    return f" Did you mean {' or '.join(prefix + name for name in names)}?" if names else ""


def first_lines(error: Exception) -> str:
    """Hydra's and OmegaConf's messages in one line, without their notes on object types."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("object_type="))


# Values


def check_values(cfg: DictConfig) -> None:
    """UserError for the first value of a resolved application config that cannot be."""
    for group in ("task", "model", "data", "reward", "family", "objective", "precision", "trainer"):
        if cfg.get(group) is None:
            raise UserError(f"A run needs a {group}; choose one with {group}=<option>.")
    for key in _COUNTS:
        _check(cfg, key, lambda value: _is_whole(value) and value >= 1, "a whole number of at least 1")
    for key in _OPTIONAL_COUNTS:
        _check(cfg, key, lambda value: value is None or _is_whole(value) and value >= 1, "a whole number of at least 1")
    for key in _OPTIONAL_POSITIVE:
        _check(cfg, key, lambda value: value is None or _is_number(value) and value > 0, "a number above 0")
    _check(cfg, "seed", lambda value: _is_whole(value) and 0 <= value < _SEEDS, "a whole number from 0 to 4294967295")
    _check(cfg, "task.iterations", lambda n: n is None or (_is_whole(n) and n >= 0), "a whole number of at least 0")
    for key in ("family.keep", "task.keep"):
        _check(cfg, key, lambda value: _is_whole(value) and value >= 2, _KEEP_RULE)
    if "prompt_file" not in cfg.task:  # task=generate has texts in task.prompts, task=audit their number
        _check(cfg, "task.prompts", lambda value: _is_whole(value) and value >= 1, "a whole number of at least 1")
    for key in _POSITIVE:
        _check(cfg, key, lambda value: _is_number(value) and value > 0, "a number above 0")
    for key in _NON_NEGATIVE:
        _check(cfg, key, lambda value: _is_number(value) and value >= 0, "a number of at least 0")
    for key in _FRACTIONS:
        _check(cfg, key, lambda value: _is_number(value) and 0 < value <= 1, "a fraction above 0 and at most 1")
    _check(cfg, "model.solver", lambda value: value in SOLVERS, f"one of {', '.join(SOLVERS)}")
    _check(cfg, "model.weights", lambda value: value in ("pretrained", "random"), "pretrained or random")
    _check(cfg, "old_velocity", lambda value: value in ("policy", "merged"), "policy or merged")
    _check_trainer(cfg)
    _check_checkpoint(cfg)
    _check(cfg, "family.compile", lambda value: value in (True, False, "auto"), "true, false or auto")
    _check_rewards(cfg)
    _check_folders(cfg)
    _check_stages(cfg.family)
    _check_rungs(cfg.family)
    _check_decoders(cfg)
    _check_kept(cfg.family, "family")
    if "pool" in cfg.task and "keep" in cfg.task:
        _check_kept(cfg.task, "task")


def reward_members(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    """The entries of ``cfg.reward``, one for each chosen reward."""
    members: Any = OmegaConf.to_container(cfg.reward, resolve=True)
    return {name: member for name, member in members.items() if name != "pretrained"}


def _check_trainer(cfg: DictConfig) -> None:
    for key, allowed, rule, way_out in _TRAINER:
        value = cfg.trainer.get(key, allowed[0])
        # A strategy may also be a _target_; build.instantiate_trainer looks at the object.
        if str(value) not in allowed and not (key == "strategy" and isinstance(value, DictConfig)):
            raise UserError(f"trainer.{key}={value} is invalid: {rule}. {way_out}")
    if cfg.trainer.get("max_epochs") != cfg.iterations:
        raise UserError(
            f"trainer.max_epochs={cfg.trainer.get('max_epochs')} is invalid: a Lightning epoch is one iteration, and "
            f"iterations={cfg.iterations} is their number. Leave it out, or set iterations=<number>."
        )


def _check_checkpoint(cfg: DictConfig) -> None:
    checkpoint = OmegaConf.select(cfg, "callbacks.checkpoint")
    if checkpoint is None:
        return
    folder = f"{cfg.run_dir}/checkpoints"
    for key, allowed, default in (*_CHECKPOINT, ("dirpath", (folder,), None)):
        value = checkpoint.get(key, default)
        if str(value) not in allowed:
            raise UserError(
                f"callbacks.checkpoint.{key}={value} is invalid: this callback writes checkpoints/last.ckpt, the last "
                f"state, for ckpt=last. Leave it at {allowed[0]}, and add a callback for other checkpoints: "
                "'+callbacks.mine={_target_:lightning.pytorch.callbacks.ModelCheckpoint,filename:mine,"
                "dirpath:${run_dir}/checkpoints,monitor:eval/<reward>,mode:max}'"
            )


def _check_rewards(cfg: DictConfig) -> None:
    members = reward_members(cfg)
    for name, member in members.items():
        if not isinstance(member, dict) or "_target_" not in member or "weight" not in member:
            raise UserError(
                f"reward.{name} must have a _target_ and a weight; got {member}. A reward's file begins with "
                f"`# @package reward` and has one key, the reward's name, with those below it."
            )
        _check(cfg, f"reward.{name}.weight", _is_number, "a number; 0 for a reward that is only evaluated")
    if all(member["weight"] == 0 for member in members.values()):
        raise UserError(
            f"At least one reward needs a weight other than 0; got 0 for {', '.join(members) or 'no reward at all'}."
        )
    loaded = [name for name, member in members.items() if "pretrained" in member]
    if cfg.reward.pretrained is not None and (len(members) > 1 or not loaded):
        way_out = f"Say {' or '.join(f'reward.{name}.pretrained' for name in loaded)}." if loaded else "Leave it out."
        raise UserError(
            f"reward.pretrained is for one reward that is loaded from files; got {', '.join(members)}. {way_out}"
        )


def _check_folders(cfg: DictConfig) -> None:
    """A hub id may look like a relative path; what begins as a path only can be none."""
    names = ["model.pretrained", "model.preview_decoder", "reward.pretrained"]
    files = ("pretrained", "processor", "tokenizer")
    names += [f"reward.{name}.{key}" for name in reward_members(cfg) for key in files]
    for key in names:
        value = OmegaConf.select(cfg, key)
        if value is not None and str(value).startswith(("/", ".", "~")) and not Path(value).expanduser().exists():
            raise UserError(f"{key} must be a hub id, a local folder or file; there is none at {value}.")


def _check_stages(family: DictConfig) -> None:
    for name in ("explore", "regenerate"):
        stage = family.get(name)
        if stage is None and name == "explore":
            continue
        if stage is None or any(stage.get(key) is None for key in ("sampler", "steps", "solver")):
            raise UserError(
                f"family.{name} must have a sampler, steps and a solver; got {stage}. Choose a family that has them."
            )
        for key, known in (("sampler", SAMPLERS), ("solver", SOLVERS)):
            if stage[key] not in known:
                raise UserError(f"family.{name}.{key} must be one of {', '.join(known)}; got {stage[key]!r}.")


def _check_rungs(family: DictConfig) -> None:
    """Raise UserError for steps to stop after that no race or prefix can have."""
    explore, regenerate = family.get("explore"), family.regenerate
    if regenerate.get("stop_after") is not None:
        raise UserError("family.regenerate goes to the end of its trajectories: stop_after belongs to family.explore.")
    if explore is None:
        return
    if explore.get("rungs") is not None:
        check_race("family.explore.rungs", explore.rungs, explore.steps, family.pool, family.keep)
        last = explore.rungs[-1].step
    elif explore.get("stop_after") is not None:
        last = explore.stop_after
        if not _is_whole(last) or not 1 <= last < explore.steps:
            raise UserError(
                f"family.explore.stop_after={last} is invalid: it must be at least 1 and below "
                f"family.explore.steps={explore.steps}."
            )
    else:
        return
    ways = [[stage[key] for key in ("sampler", "steps", "solver")] for stage in (explore, regenerate)]
    if ways[0] != ways[1] and explore.sampler == regenerate.sampler:
        raise UserError(
            "family.explore stops its trajectories and family.regenerate samples with the same weights, so it must "
            f"continue them with the same steps and solver; got {', '.join(map(str, ways[0]))} and "
            f"{', '.join(map(str, ways[1]))}."
        )
    if ways[0] == ways[1] and last == explore.steps:
        raise UserError(
            f"family.explore.rungs={explore.rungs} is invalid: its last step is the end of the trajectory, of which "
            "nothing is left to regenerate. End it earlier."
        )


def check_race(key: str, rungs: Any, steps: int, pool: int, keep: int) -> None:
    """Raise UserError unless rungs {step, keep} take more steps and keep fewer candidates each, at last ``keep``."""
    rule = (
        f"{key}={rungs} is invalid: each rung must have a step above the one before it, up to {steps}, and a keep not "
        f"above that of the one before it, from the pool of {pool} down to {keep} in the last one"
    )
    known = isinstance(rungs, ListConfig | list) and rungs and all(hasattr(rung, "keys") for rung in rungs)
    if not known or any(set(rung.keys()) != {"step", "keep"} for rung in rungs):
        raise UserError(f"{rule}. Give them as '{key}=[{{step:2,keep:{pool // 2}}},{{step:4,keep:{keep}}}]'.")
    numbers = [(rung["step"], rung["keep"]) for rung in rungs]
    whole = all(_is_whole(number) for pair in numbers for number in pair)
    ordered = whole and all(a < b and n >= m for (a, n), (b, m) in itertools.pairwise([(0, pool), *numbers]))
    if not ordered or numbers[-1][0] > steps or numbers[-1][1] != keep:
        raise UserError(f"{rule}. Give them as '{key}=[{{step:2,keep:{pool // 2}}},{{step:4,keep:{keep}}}]'.")


def _check_decoders(cfg: DictConfig) -> None:
    if cfg.family.regenerate.get("decoder", "full") != "full":
        raise UserError("family.regenerate scores what is trained on, decoded in full: decoder is for family.explore.")
    if cfg.family.get("explore") is not None:
        check_decoder(cfg, "family.explore.decoder", cfg.family.explore.get("decoder", "full"))


def check_decoder(cfg: DictConfig, key: str, decoder: Any) -> None:
    """UserError if ``decoder``, the value of ``key``, is none or is one that the model does not have."""
    if decoder not in DECODERS:
        raise UserError(f"{key} must be one of {', '.join(DECODERS)}; got {decoder!r}.")
    if decoder == "preview" and cfg.model.get("preview_decoder") is None:
        raise UserError(
            f"{key}=preview needs a tiny autoencoder of this model's latents, and model.preview_decoder names none. "
            f"docs/models names those that fit, model=tiny brings one (model.preview_decoder=tiny); or say {key}=full."
        )


def _check_kept(settings: DictConfig, where: str) -> None:
    if settings.keep > settings.pool:
        raise UserError(
            f"{where}.keep must be at most {where}.pool, of which it is a part; got keep={settings.keep} of "
            f"pool={settings.pool}. Raise {where}.pool or lower {where}.keep."
        )


def _check(cfg: DictConfig, key: str, holds: Callable[[Any], bool], rule: str) -> None:
    value = OmegaConf.select(cfg, key, default=_ABSENT)
    if value is not _ABSENT and not holds(value):
        raise UserError(f"{key} must be {rule}; got {'null' if value is None else repr(value)}.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_machine(cfg: DictConfig) -> None:
    """UserError for what torch can tell: devices, a precision or an optimiser that cannot be had."""
    if uses_model(cfg):
        check_devices(cfg)
    if not {"train", "eval"}.isdisjoint(cfg.task.reads):  # a task that samples
        check_precision(cfg)
    if "train" in cfg.task.reads:
        check_optimizer(cfg)


def check_devices(cfg: DictConfig) -> None:
    """UserError for GPUs that this machine does not have; Lightning would say so, once it is loaded."""
    import torch  # here: --help and mistakes do without

    accelerator, devices = cfg.trainer.get("accelerator"), cfg.trainer.get("devices")
    there = torch.cuda.device_count()
    if accelerator == "cuda" or (accelerator == "gpu" and not torch.backends.mps.is_available()):
        wanted = int(devices) if str(devices).isdigit() else 1
        if wanted > there:
            raise UserError(
                f"trainer.accelerator={accelerator} trainer.devices={devices} is invalid: torch finds {there} GPUs "
                "on this machine. trainer=auto takes what there is."
            )


def check_precision(cfg: DictConfig) -> None:
    """UserError for a precision or a backend that does not exist, or that the hardware does not have."""
    import torch  # here: --help and mistakes do without

    from solrl_lightning.quantization import resolve

    gpu = cfg.trainer.accelerator != "cpu" and torch.cuda.is_available()
    resolve(cfg.precision.name, cfg.precision.backend, torch.device("cuda", 0) if gpu else torch.device("cpu"))


# What the user's own targets need


def make(key: str, node: Any, *given: Any, takes: str = "", kind: type = object, **options: Any) -> Any:
    """Instantiates ``node``, the value of ``key``, which also ``takes`` what is ``given`` and the ``options``.

    Raises:
        UserError: it has no _target_, Python does not find that, it does not take its keys, or it makes another kind.
    """
    if not isinstance(node, DictConfig | dict) or "_target_" not in node:
        raise UserError(f"{key}={node} is invalid: it must have a _target_, a class that Python finds.")
    target = node["_target_"]
    try:
        made = instantiate(node, *given, **options)
    except InstantiationException as error:
        cause: BaseException = error.__cause__ or error
        if isinstance(cause, UserError):
            raise
        if unknown := str(cause).startswith(("Error loading", "Expected a callable")):  # Hydra's; it quotes its cause
            cause = cause.__cause__ or cause
        found = " ".join(str(cause).partition("full_key:")[0].split()).rstrip(".?")
        way_out = (
            "Name a class that Python finds; where it is your own, with PYTHONPATH=<folder of your module>."
            if unknown
            else f"It must take {takes}{takes and ' and '}the keys beside _target_. Leave a key out with "
            f"~{key}.<name>, add one with +{key}.<name>=<value>."
        )
        raise UserError(f"{key}: {target} could not be made: {found}. {way_out}") from error
    if not isinstance(made, kind):
        raise UserError(f"{key}: {target} is invalid: it must be a {kind.__module__}.{kind.__qualname__}.")
    return made


def check_optimizer(cfg: DictConfig) -> None:
    """Raise UserError for an optimiser or an objective that cannot be made."""
    import torch  # here: --help and mistakes do without

    from solrl_lightning.objectives.base import Objective

    lora, kind = torch.nn.Parameter(torch.zeros(2, 2)), torch.optim.Optimizer
    make("optimizer", cfg.optimizer, [lora], _partial_=False, takes="a list of parameters", kind=kind)
    make("objective", cfg.objective, kind=Objective)


# What a task needs


def check_needs(cfg: DictConfig) -> None:
    """UserError where the task was not given what it needs, as far as that can be told without reading or torch."""
    if "ckpt" in cfg.task.reads and cfg.ckpt is None:
        raise UserError("this task takes a checkpoint's weights; name it with ckpt=<file>, or ckpt=last for the newest")
    if "prompt_file" in cfg.task:
        requested_weights(cfg)
        _check_seeds(cfg)
        _requested_texts(cfg)
    if "proxies" in cfg.task:
        _check_proxies(cfg)
    for name in ("train", "eval"):
        if name in cfg.task.reads:
            check_source(str(cfg.data[name]))
    if uses_model(cfg):
        _check_resolution(cfg)


def uses_model(cfg: DictConfig) -> bool:
    return bool(cfg.task.reads) or "prompt_file" in cfg.task


def _check_resolution(cfg: DictConfig) -> None:
    """As ``PipelinePolicy`` does once it is loaded, where the config files of the model are on this machine."""
    folder, side = config_folder(str(cfg.model.get("pretrained"))), cfg.model.get("resolution", 0)
    if folder is None:
        return
    try:
        parts = [(folder / part / "config.json").read_text() for part in ("vae", "transformer")]
        configs: list[dict[str, Any]] = [dict(json.loads(text)) for text in parts]
    except (OSError, ValueError, TypeError, RecursionError):
        return  # missing or damaged, which loading reports
    vae, transformer = configs
    halvings = len(vae.get("block_out_channels", vae.get("encoder_block_out_channels", [0]))) - 1
    packs = transformer.get("_class_name") == "FluxTransformer2DModel"  # its patch_size says 1
    pixels = 2**halvings * (2 if packs else transformer.get("patch_size", 1))
    if side % pixels:
        raise UserError(
            f"model.resolution must be a multiple of {pixels}, the pixels of one image token of this model; got {side}"
        )


def requested_prompts(cfg: DictConfig) -> list[str]:
    """What task=generate makes pictures of: texts of the command line or of a file."""
    given = _requested_texts(cfg)
    if given:
        return given
    from solrl_lightning.data.prompts import read_prompts  # here, as below: it imports torch

    return read_prompts(cfg.task.prompt_file, cfg.data.column)


def _requested_texts(cfg: DictConfig) -> list[str]:
    """The texts of the command line; none where a file has them."""
    given, file = OmegaConf.to_container(cfg.task)["prompts"], cfg.task.prompt_file  # type: ignore[call-overload, index]
    example = """for example 'task.prompts=["a red apple", "two dogs"]'"""
    if not isinstance(given, list):
        raise UserError(f"task.prompts must be a list of texts, {example}; got {given!r}")
    if bool(given) == (file is not None):
        found = "both" if given else "neither"
        raise UserError(f"task=generate takes task.prompts, {example}, or task.prompt_file=<file>; got {found}")
    for prompt in given:
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f"every one of task.prompts must be a text, {example}; got {prompt!r} among them")
    if file is not None:
        check_source(str(file))
    return given


def requested_weights(cfg: DictConfig) -> dict[str, str]:
    """The name of each model in task=generate, and its name in ``SolRLModule.sample``."""
    if not cfg.task.base and cfg.ckpt is None:
        raise UserError("task.base=false leaves the trained weights only; name them with ckpt=<file> or ckpt=last")
    return ({"base": "base"} if cfg.task.base else {}) | ({"trained": "ema"} if cfg.ckpt is not None else {})


def _check_seeds(cfg: DictConfig) -> None:
    if cfg.task.seeds is None:
        return
    given = OmegaConf.to_container(cfg.task)["seeds"]  # type: ignore[call-overload, index]
    whole = isinstance(given, list) and all(_is_whole(seed) and 0 <= seed < _SEEDS for seed in given)
    if not whole or not given or len(set(given)) < len(given):
        raise UserError(
            "task.seeds must be a list of different whole numbers from 0 to 4294967295, for example "
            f"'task.seeds=[1,2,3]'; got {given!r}. Leave it out for the seeds of evaluations."
        )


def _check_proxies(cfg: DictConfig) -> None:
    proxies = cfg.task.proxies
    if not proxies:
        raise UserError("task.proxies is empty: name at least one, e.g. task.proxies=[{sampler:shadow,steps:6}]")
    for number, proxy in enumerate(proxies):
        steps, stop_after = proxy.get("steps"), proxy.get("stop_after")
        known = proxy.keys() <= _PROXY_KEYS and proxy.get("sampler") in SAMPLERS
        known = known and proxy.get("solver", SOLVERS[0]) in SOLVERS
        stops = stop_after is None or (_is_whole(stop_after) and _is_whole(steps) and 1 <= stop_after < steps)
        if not known or not _is_whole(steps) or steps < 1 or not stops:
            raise UserError(
                f"a proxy has a sampler ({', '.join(SAMPLERS)}), at least 1 step and, where they are not the run's, a "
                f"precision, a solver ({', '.join(SOLVERS)}) and rungs, or a step below the last to stop_after; got "
                f"{proxy}"
            )
        if proxy.get("rungs") is not None:
            check_race(f"task.proxies.{number}.rungs", proxy.rungs, steps, cfg.task.pool, cfg.task.keep)
        check_decoder(cfg, f"task.proxies.{number}.decoder", proxy.get("decoder", "full"))


def prompt_sets(cfg: DictConfig) -> "PromptSets":
    """The prompts that the task reads (``task.reads``); of the others, none."""
    from solrl_lightning.data.prompts import read_prompt_sets

    train, held_out = (cfg.data[name] if name in cfg.task.reads else None for name in ("train", "eval"))
    return read_prompt_sets(train, held_out, cfg.data.column)


def check_prompts(cfg: DictConfig) -> None:
    """UserError for a prompt source that cannot be read, or that has fewer prompts than an iteration takes."""
    if not uses_model(cfg):
        return
    if "prompt_file" in cfg.task:
        requested_prompts(cfg)
    available = len(prompt_sets(cfg).train)
    if "train" in cfg.task.reads and cfg.prompts_per_iteration > available:
        raise UserError(
            f"prompts_per_iteration must be at most the number of different prompts in data.train; got "
            f"{cfg.prompts_per_iteration} with {available} in {cfg.data.train}."
        )
