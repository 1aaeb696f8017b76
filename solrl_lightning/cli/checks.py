"""Rules for the values of a composed configuration.

They hold before a library is loaded and before a file is written. Each function raises UserError for the first value
that breaks a rule of one group of keys; `check_values` calls those that need nothing but the configuration.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from solrl_lightning.cli.config import ConfigTree
from solrl_lightning.cli.hub import check_push
from solrl_lightning.data.sources import check_source, dataset_of
from solrl_lightning.errors import UserError, did_you_mean, nearest
from solrl_lightning.policies.config_files import config_folder
from solrl_lightning.precisions import check_backend
from solrl_lightning.rewards.addresses import check_served, check_url, read_token
from solrl_lightning.rewards.geneval_metadata import check_metadata

if TYPE_CHECKING:
    from solrl_lightning.data.prompts import PromptSets

SAMPLERS = ("shadow", "merged", "policy")
SOLVERS = ("euler", "dpm2")
DECODERS = ("full", "bf16", "preview")
MAX_SEED = 2**32 - 1
MAX_STEPS, MAX_IMAGES = 1000, 100_000
_FAMILY_KEYS = {"pool", "keep", "explore", "regenerate", "compile", "warning"}
_EXPLORER_KEYS = {"sampler", "steps", "solver", "stop_after", "rungs", "decoder"}
LORA_FILE = "pytorch_lora_weights.safetensors"  # of diffusers' save_lora_weights
_ABSENT = object()  # a key that the chosen options do not have


def check_values(cfg: DictConfig) -> None:
    """UserError for the first invalid value of a resolved application config."""
    check_numbers(cfg)
    check_trainer(cfg)
    check_checkpoint(cfg)
    check_rewards(cfg)
    check_paths(cfg)
    check_stages(cfg)
    check_choices(cfg)
    check_sharded(cfg)


# Kinds

_ONE_EACH = "task model data family objective scheduler precision trainer".split()  # a run has one option of each
REWARD_FILES = ("pretrained", "processor", "tokenizer", "head", "detector")  # keys of a reward's hub ids and paths
_DELETABLE = ("callbacks", "logger", "trainer", "reward", "optimizer", "objective", "model.quantization.exclude")
_OPEN = ("callbacks", "logger", "trainer")  # where their classes take several kinds, null among them
_NULL_IN_SOME = ("family.explore", "family.warning", "model.variant", "model.embeddings", "model.preview_decoder")
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}


def check_kinds(tree: ConfigTree, cfg: DictConfig) -> None:
    """UserError unless ``cfg``, as composed, has one option of each group that it needs, and values of their kinds."""
    for group in _ONE_EACH:
        if not isinstance(cfg.hydra.runtime.choices.get(group), str):
            raise UserError(f"A run needs a {group}; choose one with {group}=<option>.")
        if not isinstance(cfg[group], DictConfig):
            raise UserError(f"{group}={cfg[group]} is invalid: its YAML file must hold keys, not a list or a value.")
    arguments = list(cfg.hydra.overrides.task)
    choices = [str(o.input_line) for o in tree.parse(arguments) if tree.options(o.key_or_group)]
    found: Any = OmegaConf.to_container(cfg, resolve=False)
    if len(choices) < len(arguments):
        _check_kind("", OmegaConf.to_container(tree.compose(choices), resolve=False), found)
    for name in sorted(_FAMILY_KEYS - found["family"].keys()):
        fix = "Begin the family's file with `defaults: [sol_rl, _self_]`, or add the key"
        raise UserError(f"family.{name} is missing: a run needs it. {fix}.")
    _check_read("family", found["family"], _keys_of("family") | {"smoke_rungs"})
    for stage in ("explore", "regenerate"):
        _check_read(f"family.{stage}", found["family"][stage], _EXPLORER_KEYS)
    if found["model"].keys() - _keys_of("model"):  # a model's own keys, which its file or another refers to
        alone: Any = tree.compose([f"model={cfg.hydra.runtime.choices.model}"])  # no experiment overrides a reference
        given = {key: found[key] for key in found if key != "hydra"}  # which quotes the command line
        texts = [str(given), OmegaConf.to_yaml(alone)]
        referenced = re.findall(r"\bmodel\.(\w+)", "".join(texts))
        _check_read("model", found["model"], _keys_of("model") | set(referenced))


@cache
def _keys_of(group: str) -> set[str]:
    """Return the keys of the package's options of ``group``, which its code or another of its options reads."""
    options = (each for each in files("solrl_lightning.conf").joinpath(group).iterdir() if each.is_file())
    keys = {key for option in options for key in re.findall(r"^(\w+):", option.read_text(), re.M)}
    return keys - {"defaults"}  # Hydra's own


def _check_read(key: str, node: Any, known: set[str]) -> None:
    """UserError for a key of ``node``, the value of ``key``, that is not ``known``."""
    for name in sorted(node.keys() - known) if isinstance(node, dict) else ():
        near = did_you_mean(nearest(name, known))
        kind = key.partition(".")[0]
        raise UserError(f"{key}.{name}={node[name]} is invalid: nothing reads that key of a {kind}.{near}")


def _check_kind(key: str, known: Any, found: Any) -> None:
    is_open = key.partition(".")[0] in _OPEN
    if isinstance(known, dict) and isinstance(found, dict):
        for name in known.keys() - {"hydra"}:
            inner = f"{key}.{name}" if key else str(name)
            if name in found:
                _check_kind(inner, known[name], found[name])
            elif not inner.startswith(_DELETABLE):
                raise UserError(f"{inner} is missing: a run needs it. Leave ~{inner} out.")
        return
    if isinstance(known, list) and isinstance(found, list) and known and not is_open:
        if any(_kind(value) not in (_kind(known[0]), "a reference") for value in found):
            raise UserError(f"{key}={found} is invalid: each of the list must be {_kind(known[0])}. Leave it out.")
    expected, kind = _kind(known), _kind(found)
    text = expected in ("a text", "null")  # which a number or a truth value may be, too
    if (
        kind == expected
        or "a reference" in (expected, kind)
        or key in (*_CHOICES, "task.prompts")  # which have rules of their own
        or (is_open and (text or found is None))  # devices=auto may also be a list
        or (text and kind in ("a text", "a number", "true or false"))
        or (found is None and key in _NULL_IN_SOME)
        or (known is None and (key == "family.explore" or key.startswith("task.")))  # lists, among others
    ):
        return
    rule = "a single value" if expected == "null" else expected
    if key == "task.runs":
        rule = "one glob, in quotes, that matches all runs, as in 'task.runs=outputs/train/*'"
    fix = "" if known is None or isinstance(known, dict | list) else f" for {key}={known}"
    raise UserError(f"{key}={'null' if found is None else found} is invalid: it must be {rule}. Leave it out{fix}.")


def _kind(value: Any) -> str:
    if isinstance(value, str) and ("${" in value or value == "???"):  # its value is checked elsewhere
        return "a reference"
    return "a group of keys" if isinstance(value, dict) else _KINDS.get(type(value), "null")


# Numbers and choices


def _whole(least: int, most: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most  # bool is a subclass of int


def _number(holds: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and math.isfinite(value) and holds(value)


def _are_devices(value: Any) -> bool:
    if isinstance(value, ListConfig):
        return all(map(_whole(0), value)) and 0 < len(value) == len(set(value))
    return _whole(1)(value) or value == -1 or re.fullmatch(r"auto|-1|[1-9]\d*|(\d+,)+\d*", str(value)) is not None


# The rule, whether it holds for a value, and the keys that it is for, with "?" if they may be null; a key stands before
# those whose value follows it.
_RULES = {
    "a whole number of at least 1": (
        _whole(1),
        "trainer.num_nodes model.iterations model.prompts_per_iteration model.evaluation_every iterations "
        "optimizer_steps objective.reference_every prompts_per_iteration evaluation.every model.micro_batch "
        "model.decode_batch model.resolution model.max_sequence_length model.rollout_batch model.lora.rank "
        "task.repeats task.rounds task.grid_prompts family.patience callbacks.guard.patience "
        "callbacks.sample_grid.prompts reward.http.batch reward.http.concurrency task.max_images task.max_pixels "
        "data.eval_prompts? objective.window? callbacks.periodic.keep? callbacks.guard.limits.drift?",
    ),
    f"a whole number from 1 to {MAX_STEPS}": (
        _whole(1, MAX_STEPS),
        "model.full_steps model.preview_steps model.eval_steps model.prefix_steps family.explore.steps "
        "family.regenerate.steps callbacks.sample_grid.steps",
    ),
    f"a whole number from 1 to {MAX_IMAGES}": (
        _whole(1, MAX_IMAGES),
        "family.pool data.eval_images task.pool task.images task.grid_images callbacks.sample_grid.seeds_per_prompt "
        "task.sizes.pool?",
    ),
    "a whole number of at least 0": (
        _whole(0),
        "callbacks.periodic.every callbacks.rank_correlation.probe_every callbacks.sample_grid.every "
        "reward.http.retries task.iterations?",
    ),
    "auto, a number of devices, or a list of their indices such as [0,1]": (_are_devices, "trainer.devices"),
    f"a whole number from 0 to {MAX_SEED}": (_whole(0, MAX_SEED), "seed"),
    "a whole number from 0 to 65535; 0 takes a free port": (_whole(0, 65535), "task.port"),
    "a whole number of at least 2: the best and the worst of a prompt are compared with each other": (
        _whole(2),
        "family.keep task.keep",
    ),
    "a finite number above 0": (
        _number(lambda value: value > 0),
        "model.max_grad_norm objective.beta objective.advantage_clip objective.ratio_clip "
        "objective.clip_range objective.noise_level objective.eta model.learning_rate optimizer.lr "
        "scheduler.iterations reward.http.timeout callbacks.guard.limits.fall? "
        "callbacks.guard.limits.pictures? callbacks.guard.limits.diversity? callbacks.guard.limits.kl? "
        "callbacks.guard.limits.base_distance? callbacks.guard.limits.jump? objective.strength "
        "objective.advantage_scale",
    ),
    "a finite number of at least 0": (
        _number(lambda value: value >= 0),
        "model.guidance model.kl_weight objective.kl_weight objective.old_weight optimizer.weight_decay "
        "scheduler.warmup family.margin callbacks.guard.limits.lost_gain reward.http.backoff",
    ),
    "a finite number of at least 1; 1 is without guidance": (_number(lambda value: value >= 1), "model.guidance_scale"),
    "a number above 0 and at most 1000000": (_number(lambda value: 0 < value <= 1_000_000), "model.lora.alpha"),
    "a finite number of at least 1e-30, as float32 takes smaller ones for 0 and a step divides by it": (
        _number(lambda value: value >= 1e-30),
        "optimizer.eps",
    ),
    "a fraction above 0 and at most 1": (
        _number(lambda value: 0 < value <= 1),
        "model.train_timestep_fraction objective.timestep_fraction task.min_gap family.threshold "
        "reward.geneval.threshold reward.geneval.counting_threshold",
    ),
}
_CHOICES = {
    "trainer.accelerator": ("auto", "cpu", "gpu", "cuda", "mps", "tpu"),
    "training_sampler": ("merged", "policy"),
    "model.solver": SOLVERS,
    "family.explore.sampler": SAMPLERS,
    "family.explore.solver": SOLVERS,
    "family.regenerate.sampler": SAMPLERS,
    "family.regenerate.solver": SOLVERS,
    "model.weights": ("pretrained", "random"),
    "base_weights": ("bfloat16", "int8", "nf4"),
    "encode_on": ("device", "cpu"),
    "old_velocity": ("policy", "merged"),
    "family.compile": (True, False, "auto"),
    "compile_training": (True, False, "auto"),
    "model.gradient_checkpointing": (True, False, "selective"),
    "reward.combine": ("sum", "gdpo"),
    "reward.geneval.strict": (True, False),
}


def check_numbers(cfg: DictConfig) -> None:
    rules = [(key, holds, rule) for rule, (holds, keys) in _RULES.items() for key in keys.split()]
    if "prompt_file" not in cfg.task:  # task.prompts are texts in task=generate, else their number
        rules.append(("task.prompts", _whole(1), "a whole number of at least 1"))
    for marked, holds, rule in rules:
        key, nullable = marked.rstrip("?"), marked.endswith("?")
        value = OmegaConf.select(cfg, key, default=_ABSENT)
        if value is not _ABSENT and not holds(value) and not (nullable and value is None):
            raise _invalid(key, value, f"{rule}{', or null' * nullable}. Leave it out for the default")
    for where in ("family", "task"):
        keep, pool = (OmegaConf.select(cfg, f"{where}.{key}") for key in ("keep", "pool"))
        if keep is not None and pool is not None and keep > pool:
            rule = f"at most {where}.pool={pool}. Raise {where}.pool or lower {where}.keep"
            raise _invalid(f"{where}.keep", keep, rule)
    if cfg.optimizer_steps > cfg.family.keep:
        rule = f"at most family.keep={cfg.family.keep}, so that each step has rows of every prompt"
        raise _invalid("optimizer_steps", cfg.optimizer_steps, rule)


def check_choices(cfg: DictConfig) -> None:
    for key, choices in _CHOICES.items():
        value = OmegaConf.select(cfg, key, default=_ABSENT)
        # 1 and 1.0 equal True, and are none of these choices
        if value is not _ABSENT and not any(type(value) is type(choice) and value == choice for choice in choices):
            raise _invalid(key, value, f"one of {', '.join(str(choice).lower() for choice in choices)}")
    check_backend(cfg.precision.name, cfg.precision.backend)
    for key in ("family.compile", "compile_training", "task.compile"):
        if cfg.base_weights != "bfloat16" and OmegaConf.select(cfg, key) is True:
            raise UserError(
                f"base_weights={cfg.base_weights} is invalid with {key}=true: torch.compile does not run stored "
                f"weights of torchao. Set {key}=false."
            )


def _invalid(key: str, value: Any, rule: str) -> UserError:
    return UserError(f"{key}={'null' if value is None else value} is invalid: it must be {rule}.")


# Lightning's Trainer and the checkpoint callback

# The options that would change or cut short an iteration: key below `trainer`, allowed values with the default first,
# rule and fix. The others do what Lightning documents.
_ONE_STEP = "an iteration takes its optimiser steps on the gradients of all its micro-batches"
_TRAINER = {
    "precision": (
        "None 32 32-true",
        "every dtype is set in the code and Lightning casts nothing. Leave it at trainer.precision=32-true.",
    ),
    "strategy": (
        "auto single_device ddp ddp_find_unused_parameters_false ddp_find_unused_parameters_true",
        "every rank holds the whole policy, so it must be one of auto, single_device, ddp, "
        "ddp_find_unused_parameters_false, ddp_find_unused_parameters_true. Use trainer.strategy=ddp.",
    ),
    "accumulate_grad_batches": (
        "1",
        f"{_ONE_STEP}; their number follows from model.micro_batch. Leave it out, or set model.micro_batch=<rows>.",
    ),
    "limit_train_batches": ("None 1.0", f"{_ONE_STEP}. Leave it out."),  # 1 is one batch, 1.0 is all of them
    "overfit_batches": ("0 0.0", f"{_ONE_STEP}. Leave it out."),
    "fast_dev_run": ("False 0", f"{_ONE_STEP}. Use experiment=smoke to run everything once."),
    "limit_val_batches": (
        "None 0 0.0 1 1.0",
        "an evaluation is one batch, which is run (1) or not (0). Set data.eval_prompts=<n> for a shorter evaluation.",
    ),
    "val_check_interval": (
        "None 1.0",
        "weights change once per iteration, so evaluations are counted in iterations. Set "
        "evaluation.every=<iterations>.",
    ),
    "max_time": (
        "None",
        "it would stop within an iteration, before its optimiser step. Stop after one: "
        """'+callbacks.timer={_target_:lightning.pytorch.callbacks.Timer,duration:"00:12:00:00",interval:epoch}'.""",
    ),
}
# Options of callbacks.checkpoint: Lightning's default, and the values that keep checkpoints/last.ckpt the newest state.
_CHECKPOINT = {
    "filename": (None, "last"),
    "monitor": (None, "None"),
    "save_top_k": (1, "1"),
    "save_last": (None, "None", "False"),
    "save_weights_only": (False, "False"),
    "enable_version_counter": (True, "False"),
}


def check_trainer(cfg: DictConfig) -> None:
    for key, (allowed, rule) in _TRAINER.items():
        value = cfg.trainer.get(key, allowed.split()[0])
        # build.instantiate_trainer checks a strategy with a _target_.
        if str(value) not in allowed.split() and not (key == "strategy" and isinstance(value, DictConfig)):
            raise UserError(f"trainer.{key}={value} is invalid: {rule}")
    epochs = cfg.trainer.get("max_epochs")
    if epochs != cfg.iterations:
        raise UserError(
            f"trainer.max_epochs={epochs} is invalid: a Lightning epoch is one iteration, and there are "
            f"iterations={cfg.iterations}. Leave it out, or set iterations=<number>."
        )


def is_sharded(cfg: DictConfig) -> bool:
    """Whether the ranks share the frozen weights, as with trainer=fsdp."""
    return OmegaConf.select(cfg, "trainer.strategy._target_") == "solrl_lightning.training.sharding.ShardedBase"


def check_sharded(cfg: DictConfig) -> None:
    """UserError for an option that needs a copy of the transformer, or forward passes on rank 0 alone."""
    if not is_sharded(cfg):
        return
    if cfg.task._target_ != "solrl_lightning.tasks.train.train":
        raise UserError("trainer=fsdp is invalid: only task=train shards the weights. Set trainer=auto.")
    ways = [cfg.family.get("explore"), *(cfg.family.get("levels") or [])]
    rules = {
        "family.explore.sampler=shadow": (any(way and way.sampler == "shadow" for way in ways), "family=prefix"),
        "family.compile=true": (cfg.family.compile is True, "family.compile=false"),
        "compile_training=true": (cfg.compile_training is True, "compile_training=false"),
        f"base_weights={cfg.base_weights}": (cfg.base_weights != "bfloat16", "base_weights=bfloat16"),
        "callbacks.sample_grid": (
            bool(OmegaConf.select(cfg, "callbacks.sample_grid.every")),
            "callbacks.sample_grid.every=0",
        ),
    }
    for option, (found, fix) in rules.items():
        if found:
            raise UserError(
                f"{option} is invalid with trainer=fsdp: ranks have no copy of the weights and compute each forward "
                f"pass together. Set {fix}."
            )


def check_checkpoint(cfg: DictConfig) -> None:
    names = list(reward_members(cfg))
    names += ["weighted_sum"] if len(names) > 1 else []
    monitor = OmegaConf.select(cfg, "callbacks.best.monitor")
    if monitor is not None and monitor not in names:
        raise _invalid("callbacks.best.monitor", monitor, f"one of the run's rewards, {', '.join(names)}, or null")
    checkpoint = OmegaConf.select(cfg, "callbacks.checkpoint")
    if checkpoint is None:
        return
    for key, (default, *allowed) in (_CHECKPOINT | {"dirpath": (None, f"{cfg.run_dir}/checkpoints")}).items():
        value = str(checkpoint.get(key, default))
        if value not in allowed:
            raise UserError(
                f"callbacks.checkpoint.{key}={value} is invalid: this callback writes checkpoints/last.ckpt, the last "
                f"state, for ckpt=last. Leave it at {allowed[0]}. For others set callbacks.best.monitor=<reward> or "
                "callbacks.periodic.every=<iterations>."
            )


# Rewards and paths


def reward_members(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    """The entries of ``cfg.reward``, one for each chosen reward."""
    members: Any = OmegaConf.to_container(cfg.reward, resolve=True)
    return {name: member for name, member in members.items() if name not in ("pretrained", "combine")}


def check_rewards(cfg: DictConfig) -> None:
    members = reward_members(cfg)
    for name, member in members.items():
        if not isinstance(member, dict) or "_target_" not in member or "weight" not in member:
            raise UserError(
                f"reward.{name}={member} is invalid: it must have a _target_ and a weight. Begin the reward's file "
                "with `# @package reward`, and put them below its one key, the reward's name."
            )
        if not _number(lambda value: True)(member["weight"]):
            rule = "a finite number; 0 for a reward that is only evaluated"
            raise _invalid(f"reward.{name}.weight", member["weight"], rule)
        if member["_target_"] == "solrl_lightning.rewards.http.HTTPReward":
            check_url(f"reward.{name}.url", member.get("url"))
            read_token()
    if all(member["weight"] == 0 for member in members.values()):
        names = ", ".join(members) or "no reward at all"
        raise UserError(f"At least one reward needs a weight other than 0; got 0 for {names}.")
    loaded = [name for name, member in members.items() if "pretrained" in member]
    if cfg.reward.pretrained is not None and (len(members) > 1 or not loaded):
        fix = f"Set {' or '.join(f'reward.{name}.pretrained' for name in loaded)}." if loaded else "Leave it out."
        raise UserError(
            f"reward.pretrained={cfg.reward.pretrained} is invalid: it is for one reward that is loaded from files; "
            f"got {', '.join(members)}. {fix}"
        )


def check_paths(cfg: DictConfig) -> None:
    """Rejects a path-like value (/, ., ~) that does not exist; anything else may be a hub id."""
    keys = ["model.pretrained", "model.preview_decoder", "reward.pretrained"]
    for key in (*keys, *(f"reward.{name}.{part}" for name in reward_members(cfg) for part in REWARD_FILES)):
        value = OmegaConf.select(cfg, key)
        if value is not None and str(value).startswith(("/", ".", "~")) and not Path(value).expanduser().exists():
            raise _invalid(key, value, "a hub id, a local folder or file; there is none at that path")

    lora = OmegaConf.select(cfg, "model.init_lora")
    if lora is not None and cfg.ckpt is None:  # a resumed run has its adapters from the checkpoint
        path = Path(str(lora)).expanduser()
        if not (path / LORA_FILE if path.is_dir() else path).is_file():
            raise _invalid("model.init_lora", lora, f"a LoRA file of diffusers, or a folder with {LORA_FILE}")


# The family's stages


def check_stages(cfg: DictConfig) -> None:
    explore, regenerate = (cfg.family.get(name) for name in ("explore", "regenerate"))
    for name, stage in (("explore", explore), ("regenerate", regenerate)):
        if (stage is None and name == "regenerate") or (stage and None in _way(stage)):
            rule = "a stage with a sampler, steps and a solver. Choose a family that has it"
            raise _invalid(f"family.{name}", stage, rule)
    window = cfg.objective.get("window")
    if window is not None and window > max(1, regenerate.steps // 2):
        rule = f"at most {max(1, regenerate.steps // 2)}, half of family.regenerate.steps={regenerate.steps}"
        raise _invalid("objective.window", window, f"{rule}. Set objective.window=null for all steps")
    if regenerate.get("stop_after") is not None:
        raise UserError("family.regenerate.stop_after is not supported. Set family.explore.stop_after.")
    if regenerate.get("decoder", "full") != "full":
        rule = "full, as its rewards train the policy. Set family.explore.decoder"
        raise _invalid("family.regenerate.decoder", regenerate.decoder, rule)
    if "levels" in cfg.family:
        _check_levels(cfg)
    elif explore is not None:
        _check_explore(cfg, "family.explore", explore)


def _check_explore(cfg: DictConfig, key: str, explore: DictConfig) -> None:
    regenerate, stop = cfg.family.regenerate, explore.get("stop_after")
    if stop is not None and not _whole(1, explore.steps - 1)(stop):
        raise _invalid(f"{key}.stop_after", stop, f"at least 1 and below {key}.steps={explore.steps}")
    _check_images(cfg, key, explore, cfg.family)
    if explore.get("rungs") is not None:
        stop = explore.rungs[-1].step
    way = [explore.sampler, explore.steps, explore.get("solver", regenerate.solver)]
    same = way == _way(regenerate)
    if stop is not None and explore.sampler == regenerate.sampler and not same:
        raise UserError(
            f"family.regenerate={', '.join(map(str, _way(regenerate)))} is invalid: it samples with the same weights "
            f"as {key} ({', '.join(map(str, way))}), which stops early, so it continues the same "
            "trajectories and must have the same steps and solver. Set family.regenerate.steps and .solver so."
        )
    if stop == explore.steps and same:
        raise _invalid(f"{key}.rungs", explore.rungs, f"a race that ends before step {stop}, the last one")


def _check_images(cfg: DictConfig, key: str, explorer: DictConfig, counts: DictConfig) -> None:
    """UserError for a decoder or rungs of ``explorer``, the value of ``key``, that do not go with model and pool."""
    check_decoder(cfg, f"{key}.decoder", explorer.get("decoder", "full"))
    if explorer.get("rungs") is not None:
        _check_rungs(f"{key}.rungs", explorer.rungs, explorer.steps, counts.pool, counts.keep)


def _check_levels(cfg: DictConfig) -> None:
    family = cfg.family
    if not isinstance(family.levels, ListConfig) or not family.levels or family.explore is not None:
        rule = "a list of at least one way to explore, for example 'family.levels=[{sampler:shadow,steps:4},"
        raise _invalid("family.levels", family.levels, f"{rule}{{sampler:shadow,steps:6}}]', and family.explore null")
    for number, level in enumerate(family.levels):
        key = f"family.levels.{number}"
        _check_explorer(key, level, _EXPLORER_KEYS)
        _check_explore(cfg, key, level)
    if not _whole(0, len(family.levels) - 1)(family.start):
        rule = f"the index of a level, from 0 to {len(family.levels) - 1}. Set family.start=0"
        raise _invalid("family.start", family.start, rule)
    if family.threshold + family.margin > 1:
        rule = f"at most 1 - family.threshold={1 - family.threshold:.3g}, as no correlation is above 1"
        raise _invalid("family.margin", family.margin, f"{rule}. Set family.margin=0")
    probes = OmegaConf.select(cfg, "callbacks.rank_correlation.probe_every")
    if "train" in cfg.task.reads and not probes:
        rule = "at least 1, because the probes move the exploration between family.levels"
        raise _invalid("callbacks.rank_correlation.probe_every", probes, f"{rule}. Leave it out")


def _check_explorer(key: str, explorer: Any, keys: set[str]) -> None:
    """UserError unless ``explorer``, the value of ``key``, has a sampler and steps, and no other than the ``keys``."""
    if isinstance(explorer, DictConfig):
        steps, stop = explorer.get("steps"), explorer.get("stop_after")
        known = explorer.get("sampler") in SAMPLERS and explorer.get("solver", SOLVERS[0]) in SOLVERS
        if (
            explorer.keys() <= keys
            and known
            and _whole(1, MAX_STEPS)(steps)
            and (stop is None or _whole(1, steps - 1)(stop))
        ):
            return
    precision = "a precision, " if "precision" in keys else ""
    raise _invalid(
        key,
        explorer,
        f"an explorer with a sampler ({', '.join(SAMPLERS)}) and 1 to {MAX_STEPS} steps and, where they are not "
        f"the run's, {precision}a solver ({', '.join(SOLVERS)}), a decoder and rungs, or a step below the last to "
        "stop_after",
    )


def _check_rungs(key: str, rungs: Any, steps: int, pool: int, keep: int) -> None:
    """UserError unless each rung {step, keep} is later and keeps no more than the one before, at last ``keep``."""
    example = f"'{key}=[{{step:2,keep:{max(pool // 2, keep)}}},{{step:4,keep:{keep}}}]'"
    rule = (
        f"a list of rungs such as {example}, each with a step above the one before it, up to {steps}, and a keep not "
        f"above the one before it, from the pool of {pool} down to {keep} in the last rung"
    )
    written = str(rungs).replace("'", "").replace(": ", ":")
    if (
        not isinstance(rungs, ListConfig)
        or not rungs
        or any(not isinstance(rung, DictConfig) or rung.keys() != {"step", "keep"} for rung in rungs)
    ):
        raise _invalid(key, written, rule)
    numbers = [(rung.step, rung.keep) for rung in rungs]
    whole = all(_whole(1)(number) for pair in numbers for number in pair)
    ordered = whole and all(a < b and n >= m for (a, n), (b, m) in pairwise([(0, pool), *numbers]))
    if not ordered or numbers[-1][0] > steps or numbers[-1][1] != keep:
        raise _invalid(key, written, rule)


def _way(stage: DictConfig) -> list[Any]:
    return [stage.get(key) for key in ("sampler", "steps", "solver")]


def check_decoder(cfg: DictConfig, key: str, decoder: Any) -> None:
    """UserError if ``decoder``, the value of ``key``, is unknown, or is "preview" without ``model.preview_decoder``."""
    if decoder not in DECODERS:
        raise _invalid(key, decoder, f"one of {', '.join(DECODERS)}")
    if decoder == "preview" and OmegaConf.select(cfg, "model.policy.preview_decoder") is None:
        raise UserError(
            f"{key}=preview is invalid: it needs a tiny autoencoder of this model's latents, and model.preview_decoder "
            "names none. docs/models names those that fit, model=tiny brings one (model.preview_decoder=tiny); or set "
            f"{key}=full."
        )


# What a task needs


def uses_model(cfg: DictConfig) -> bool:
    return not {"train", "eval", "ckpt"}.isdisjoint(cfg.task.reads) or "prompt_file" in cfg.task


def check_needs(cfg: DictConfig) -> None:
    """UserError if the task lacks something that it needs, as far as this can be known without torch."""
    if "ckpt" in cfg.task.reads and cfg.ckpt is None:
        raise UserError(
            "This task takes the weights of a checkpoint. Set ckpt=<file>, or ckpt=last or ckpt=best of the newest run."
        )
    if "prompt_file" in cfg.task:
        requested_weights(cfg)
        _check_seeds(cfg)
        _requested_texts(cfg)
    if "proxies" in cfg.task:
        _check_proxies(cfg)
    if "port" in cfg.task:
        check_served(cfg)
    if cfg.task.get("push") is not None:
        check_push(str(cfg.task.push))
    for name in ("train", "eval"):
        if name in cfg.task.reads:
            check_source(str(cfg.data[name]))
    if uses_model(cfg):
        _check_resolution(cfg)


def _check_resolution(cfg: DictConfig) -> None:
    """Does what ``PipelineAdapter`` does after loading, where the model's config files are here and say enough."""
    folder, side = config_folder(str(cfg.model.get("pretrained"))), cfg.model.get("resolution", 0)
    if folder is None:
        return
    try:
        texts = [(folder / part / "config.json").read_text() for part in ("vae", "transformer")]
        configs: list[dict[str, Any]] = [dict(json.loads(text)) for text in texts]
    except (OSError, ValueError, TypeError, RecursionError):
        return  # loading reports missing and damaged files
    vae, transformer = configs
    levels = ("block_out_channels", "encoder_block_out_channels", "dim_mult")  # by kind of autoencoder
    halvings = next((len(vae[name]) for name in levels if name in vae), 1) - 1
    packs = transformer.get("in_channels") == 4 * vae.get("latent_channels", 0)  # a token is a patch of 2 x 2 latents
    pixels = 2**halvings * (2 if packs else transformer.get("patch_size", 1))
    if side % pixels:
        raise _invalid("model.resolution", side, f"a multiple of {pixels}, the pixels of one image token of this model")


def requested_prompts(cfg: DictConfig) -> list[str]:
    """The prompts of task=generate, from the command line or from a file."""
    if given := _requested_texts(cfg):
        return given
    from solrl_lightning.data.prompts import read_prompts  # imports torch, which --help and mistakes do without

    return read_prompts(cfg.task.prompt_file, cfg.data.column)


def _requested_texts(cfg: DictConfig) -> list[str]:
    """The prompts on the command line; empty if a file has them."""
    given, file = OmegaConf.to_container(cfg.task)["prompts"], cfg.task.prompt_file  # type: ignore[call-overload, index]
    example = """for example 'task.prompts=["a red apple", "two dogs"]'"""
    if not isinstance(given, list):
        raise _invalid("task.prompts", given, f"a list of texts, {example}")
    if bool(given) == (file is not None):
        found = "both" if given else "neither"
        raise UserError(f"task=generate takes task.prompts, {example}, or task.prompt_file=<file>; got {found}.")
    for prompt in given:
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f"task.prompts={given} is invalid: {prompt!r} is no text. Give texts, {example}.")
    if file is not None:
        check_source(str(file))
    return given


def requested_weights(cfg: DictConfig) -> dict[str, str]:
    """The name of each model in task=generate, and its name in ``SolRLModule.sample``."""
    if not cfg.task.base and cfg.ckpt is None:
        raise UserError("task.base=false leaves only the trained weights. Name them with ckpt=<file> or ckpt=last.")
    return ({"base": "base"} if cfg.task.base else {}) | ({"trained": "ema"} if cfg.ckpt is not None else {})


def _check_seeds(cfg: DictConfig) -> None:
    if cfg.task.seeds is None:
        return
    given = OmegaConf.to_container(cfg.task)["seeds"]  # type: ignore[call-overload, index]
    whole = isinstance(given, list) and all(map(_whole(0, MAX_SEED), given))
    if not whole or not given or len(set(given)) < len(given):
        rule = f"a list of different whole numbers from 0 to {MAX_SEED}, for example 'task.seeds=[1,2,3]'"
        raise _invalid("task.seeds", given, f"{rule}. Leave it out for the seeds of evaluations")


def _check_proxies(cfg: DictConfig) -> None:
    if not cfg.task.proxies:
        raise UserError("task.proxies is empty. Name at least one, as in 'task.proxies=[{sampler:shadow,steps:6}]'.")
    for number, proxy in enumerate(cfg.task.proxies):
        _check_explorer(f"task.proxies.{number}", proxy, _EXPLORER_KEYS | {"precision"})
        _check_images(cfg, f"task.proxies.{number}", proxy, cfg.task)


def prompt_sets(cfg: DictConfig) -> "PromptSets":
    """The prompts that the task reads (``task.reads``); the other sets are empty."""
    from solrl_lightning.data.prompts import read_prompt_sets  # imports torch

    train, held_out = (cfg.data[name] if name in cfg.task.reads else None for name in ("train", "eval"))
    return read_prompt_sets(train, held_out, cfg.data.column)


def check_prompts(cfg: DictConfig) -> None:
    """UserError for a prompt source that cannot be read, or that has fewer prompts than an iteration takes."""
    if not uses_model(cfg):
        return
    if "prompt_file" in cfg.task:
        requested_prompts(cfg)
    from solrl_lightning.data.prompts import PromptSchedule  # imports torch

    prompts = prompt_sets(cfg)
    if "train" in cfg.task.reads:
        PromptSchedule(prompts.train, cfg.prompts_per_iteration, cfg.seed)
    if any(member["_target_"] == "solrl_lightning.rewards.GenEval" for member in reward_members(cfg).values()):
        texts = [*prompts.train, *prompts.eval]
        check_metadata(texts, [prompts.metadata.get(text, {}) for text in texts])
    if is_sharded(cfg):
        ranks = _devices(cfg.trainer) * cfg.trainer.get("num_nodes", 1)
        evaluated = len(prompts.eval[: cfg.data.eval_prompts])
        check_shares({"prompts_per_iteration": cfg.prompts_per_iteration, "data.eval_prompts": evaluated}, ranks)


def check_shares(counts: Mapping[str, int], ranks: int) -> None:
    """UserError unless all ranks of trainer=fsdp get equally many of the prompts counted by ``counts``, by key."""
    for key, count in counts.items():
        if count % ranks:
            raise UserError(
                f"{key}={count} is invalid with trainer=fsdp: all ranks must have equally many prompts. Set it to a "
                f"multiple of {ranks}."
            )


def downloads(cfg: DictConfig) -> tuple[dict[str, str], list[str], str | None]:
    """What ``hub.check_hub`` takes: models by key and data sets that this run loads, and the model's needs."""
    keys = ["model.preview_decoder"] if uses_model(cfg) else []
    if uses_model(cfg) and cfg.model.get("weights", "pretrained") == "pretrained":
        keys += ["model.pretrained", "model.transformer_weights"]
    if not {"train", "eval", "reward"}.isdisjoint(cfg.task.reads):  # only these tasks load rewards
        parts = REWARD_FILES[1:] if cfg.reward.pretrained else REWARD_FILES
        keys += ["reward.pretrained", *(f"reward.{name}.{part}" for name in reward_members(cfg) for part in parts)]
    datasets = [dataset_of(str(cfg.data[name])) for name in ("train", "eval") if name in cfg.task.reads]
    models = {key: str(OmegaConf.select(cfg, key)) for key in keys}
    return models, [name for name in datasets if name is not None], cfg.model.get("needs")


# What torch knows


def _devices(trainer: DictConfig) -> int:
    """The number of devices of a node that the trainer uses; 1 where only Lightning can tell."""
    import torch

    devices = trainer.get("devices", "auto")
    if str(devices) in ("auto", "-1"):
        return max(1, torch.cuda.device_count() if trainer.get("accelerator") != "cpu" else 1)
    return max(1, len(devices) if isinstance(devices, ListConfig) else int(devices) if str(devices).isdigit() else 1)


def check_machine(cfg: DictConfig) -> None:
    """UserError for a device, precision or optimiser that is not available here. Imports torch, but not Lightning."""
    import torch

    from solrl_lightning.policies.base_weights import check_storage
    from solrl_lightning.quantization import resolve
    from solrl_lightning.targets import check_objective, check_optimizer

    accelerator, devices = cfg.trainer.get("accelerator"), cfg.trainer.get("devices")
    gpus = torch.cuda.device_count()
    if uses_model(cfg) and (accelerator == "cuda" or (accelerator == "gpu" and not torch.backends.mps.is_available())):
        if _devices(cfg.trainer) > gpus:
            raise UserError(
                f"trainer.accelerator={accelerator} trainer.devices={devices} is invalid: torch finds {gpus} GPUs "
                "on this machine. Use trainer=auto."
            )
    if not {"train", "eval"}.isdisjoint(cfg.task.reads):  # a task that samples
        gpu = accelerator != "cpu" and torch.cuda.is_available()
        device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        resolve(cfg.precision.name, cfg.precision.backend, device)
    if uses_model(cfg):
        check_storage(cfg.base_weights)
    if "train" in cfg.task.reads:
        check_optimizer(cfg)
        check_objective(cfg)
