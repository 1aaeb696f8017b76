"""``ckpt=``: a run resumes with its recorded overrides and, on top, the overrides of the new command line.

A run records its overrides in ``.hydra/overrides.yaml``. In its own folder only `RESUMABLE_KEYS` may change, and the
record is replaced once training has started (``run_folder.commit_overrides``).
"""

import hashlib
import json
import math
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from solrl_lightning.artifacts.complete import lora_file
from solrl_lightning.artifacts.finished_runs import FINISHED, RECORDED_CONFIG, RECORDED_OVERRIDES, read_summary
from solrl_lightning.artifacts.formatting import counted, path_option, quoted, shell_quoted
from solrl_lightning.artifacts.hub import check_fetched
from solrl_lightning.artifacts.run_folder import BEST, LAST, NEXT_RECORD, RECORD, check_free, run_of, started_runs
from solrl_lightning.cli.config import (
    EXPERIMENT,
    ConfigTree,
    adds,
    as_written,
    finding,
    is_subkey,
    named_options,
    own_sources,
    resolvable,
    searched,
)
from solrl_lightning.errors import EMPTY, UserError
from solrl_lightning.names import SHARDED
from solrl_lightning.rewards.addresses import HTTP, VLM

OUTPUTS = Path("outputs")
# In the folder of a run these keys and those below them may change: its length, what watches it, and how it is
# computed. Another change makes it another experiment.
RESUMABLE_KEYS = (
    "iterations max_seconds evaluation callbacks trainer logger hydra task ckpt explorers family.compile "
    "compile_training precision.backend model.rollout_batch model.micro_batch model.decode_batch "
    "model.gradient_checkpointing model.pretrained model.transformer_weights model.fused_lora model.embeddings "
    "data.eval data.eval_prompts data.eval_images"
).split()
_CLIPPING = ("trainer.gradient_clip_val", "trainer.gradient_clip_algorithm")  # change what is trained
_SERVER_KEYS = ("url", "concurrency", "timeout", "retries", "backoff")  # of a reward that a server computes
_LISTED_KEYS = ", ".join([*RESUMABLE_KEYS, f"reward.<server>.<{'|'.join(_SERVER_KEYS)}>"])
_DIGESTS = "digests.json"  # of values in the record
_OUTSIDE = re.compile(r"\$\{(oc\.env|now):")  # what gives another value in another process
_ELSEWHERE = " (no run was started in this folder; it is the newest on this machine)"


class Resumed(NamedTuple):
    """A command line with its checkpoint resolved."""

    arguments: list[str]
    checkpoint: Path | None = None
    folder: Path | None = None  # absolute, of the run that resumes or begins again in place
    training: bool = False
    message: str = ""
    requeued: bool = False  # a run that has finished is then no error
    newest: bool = False  # no option names the run
    elsewhere: Mapping[str, str] = {}  # advice to go where the run began, by the paths of its options only there


def resume(tree: ConfigTree, arguments: Sequence[str], multirun: bool) -> Resumed:
    """Resolve ``ckpt=``: find the file, and put the recorded overrides of its run before the command line's.

    Training from ``ckpt=last`` and ``ckpt=auto`` resumes in the same folder, as a file does whose folder is named;
    every other use of a checkpoint gets a new folder. ``ckpt=auto`` begins the run if its folder has no checkpoint.
    """
    overrides = tree.parse(arguments)
    checkpoints = [override for override in overrides if override.key_or_group == "ckpt"]
    if not checkpoints or checkpoints[-1].value() in (None, "null"):
        return Resumed(list(arguments))
    value, multirun = str(checkpoints[-1].value()), multirun or _sweeps(tree, overrides)
    if not value:
        raise UserError(f"ckpt= is invalid: {EMPTY}. Name a checkpoint file, or leave ckpt out.")
    if checkpoints[-1].is_sweep_override() or (value in ("last", "auto") and multirun):
        rule = (
            "it takes one checkpoint, and ckpt=last and ckpt=auto continue one run, so that they do not go with -m, or "
            "an experiment that sweeps"
        )
        raise UserError(f"{checkpoints[-1].input_line} is invalid: {rule}. Name one file with ckpt=<file>.")
    training = _task(tree, overrides) == "train"
    folder = next((Path(str(o.value())) for o in reversed(overrides) if o.key_or_group == "hydra.run.dir"), None)
    if value == "auto":
        folder = _stable_folder(tree, overrides, training)
        if not (folder / LAST).is_file():
            return _begin(tree, overrides, folder)
    here = True
    if value in ("last", "auto") and training and folder is not None:
        checkpoint = _last_checkpoint(tree, folder)
    elif value in ("last", "best"):
        checkpoint, here = _newest_checkpoint(LAST if value == "last" else BEST)
    else:
        checkpoint = Path(value)
    check_checkpoint(checkpoint)
    source = run_of(checkpoint)
    is_source = folder is not None and Path(os.path.realpath(folder)) == source  # resolve() raises for a link's loop
    same_folder = value in ("last", "auto") or (value != "best" and is_source)
    in_place = training and not multirun and same_folder

    has_record = (source / RECORDED_OVERRIDES).is_file()
    if training and not has_record:
        lora = source / "lora"
        begin = f". {_from_lora(lora)}" if lora.is_dir() else ""
        raise UserError(
            f"ckpt={checkpoint} is invalid: training resumes with the recorded options of the checkpoint's run, and "
            f"{source / RECORD} has none. Use the file in its run folder, or copy the whole folder{begin}."
        )
    sources = [] if tree.own_sources else _recorded_sources(source)
    tree.look_in(sources)
    new = [o for o in overrides if o.key_or_group not in ("ckpt", "hydra.run.dir")]
    recorded = [o for o in _recorded_overrides(tree, source) if o.key_or_group not in ("ckpt", "task")]
    _check_one_start(checkpoint, recorded, new)
    if not training:  # another task has other keys, and none runs with shards
        trainer = [str(o.input_line) for o in recorded if o.key_or_group == "trainer"]
        sharded = OmegaConf.select(tree.compose(trainer), "trainer.strategy._target_") == SHARDED
        recorded = [o for o in recorded if not is_subkey(_dotted(o), "task", *(["trainer"] if sharded else []))]
    valid = _still_valid(tree, recorded, new)
    lines = [str(o.input_line) for o in [*valid, *new]]
    merged = [*searched(sources), *lines, f"ckpt={quoted(checkpoint.absolute())}"]
    if not multirun and _sweeps(tree, valid):  # of which the recorded run was one job
        merged.insert(0, f"hydra.mode={RunMode.RUN.name}")
    if in_place:
        _check_resumable(tree, source, checkpoint, new, lines)
        # First, so that a further rank's own hydra.output_subdir=null, which keeps it from writing, wins.
        merged.insert(0, f"hydra.output_subdir={NEXT_RECORD.as_posix()}")
    if home := source if in_place else folder:
        merged.append(f"hydra.run.dir={quoted(home)}")
    of_run = _listed([*searched(sources), *recorded]) if has_record else "not known, because its folder has no record"
    message = (
        f"{'continuing' if in_place else 'from'} {checkpoint}{'' if here else _ELSEWHERE}, with the overrides of its "
        f"run: {of_run}; "
        f"overridden here: {_listed(new)}"
    )
    replaced = _experiments(o for o in recorded if o not in valid)
    if not set(replaced) <= set(_experiments(new)):
        message += f" (in place of experiment={','.join(replaced)}; experiment=[{','.join(replaced)},<other>] has both)"
    newest = value == "last" and folder is None
    folder, elsewhere = source if in_place else None, _advice_to_go_back(source, valid)
    return Resumed(merged, checkpoint, folder, training, message, value == "auto", newest, elsewhere)


def _task(tree: ConfigTree, overrides: Iterable[Override]) -> Any:
    """Return the task that ``overrides`` choose, which an experiment can do, too."""
    tasks = [override.value() for override in overrides if override.key_or_group == "task"]
    experiments = [str(override.input_line) for override in overrides if override.key_or_group == EXPERIMENT]
    if tasks or not experiments:
        return tasks[-1] if tasks else "train"
    return tree.compose(experiments).hydra.runtime.choices["task"]


def _experiments(overrides: Iterable[Override]) -> list[str]:
    """Return the names of the experiments that the last override of them chooses."""
    *_, last = [[], *(named_options(o) for o in overrides if o.key_or_group == EXPERIMENT)]
    return list(map(str, last))


def _sweeps(tree: ConfigTree, overrides: Iterable[Override]) -> bool:
    """Return whether ``overrides`` make a sweep of a command without -m, as an experiment can."""
    lines = [str(o.input_line) for o in overrides if o.key_or_group in (EXPERIMENT, "hydra.mode")]
    return bool(lines) and tree.compose(lines).hydra.mode == RunMode.MULTIRUN


def _check_one_start(checkpoint: Path, recorded: Iterable[Override], new: Iterable[Override]) -> None:
    """Raise UserError for a LoRA to begin with that the run of ``checkpoint`` did not have: nothing would read it."""
    before = [override.value() for override in recorded if override.key_or_group == "model.init_lora"]
    for override in new:
        if override.key_or_group == "model.init_lora" and override.value() not in (None, *before[-1:]):
            raise UserError(
                f"{override.input_line} is invalid: the weights come from ckpt={checkpoint}. Leave it out, or leave "
                "ckpt out and begin with the LoRA."
            )


def _still_valid(tree: ConfigTree, recorded: list[Override], new: list[Override]) -> list[Override]:
    """Return the ``recorded`` overrides that no ``new`` one replaces, and whose keys exist beside the ``new`` ones.

    An override without a plus sign needs a key that one with a plus sign has added. Another option of a group may lack
    keys of the former one, and then has no use for those that were added to them.
    """
    deleted = [o.key_or_group for o in new if o.is_delete()]  # what the run has added there stays, for these to delete
    changed = {o.key_or_group for o in new}
    added = {o.key_or_group for o in new if adds(o) and not is_subkey(o.key_or_group, *deleted)}
    off = [o.key_or_group for o in new if tree.options(o.key_or_group) and o.value() == "none"]  # which reads no keys
    places = _undone(tree, recorded, new)
    valid = [
        o
        for place, o in enumerate(recorded)
        if place not in places
        and (o.is_delete() or o.key_or_group not in (added if adds(o) else changed))
        and not is_subkey(o.key_or_group, *off)
    ]
    groups = [o.key_or_group for o in new if tree.options(o.key_or_group)]
    if not groups:
        return valid
    parts = [o for o in valid if adds(o) and is_subkey(o.key_or_group, *groups) and not _is_whole(o, valid)]
    keys = {key for nodes in tree.combinations([*(o for o in valid if o not in parts), *new]) for key in nodes}
    valid = [o for o in valid if o not in parts or _entry(o) in keys]
    keys |= {o.key_or_group for o in valid if o in parts}
    return [o for o in valid if o.key_or_group in keys or not is_subkey(o.key_or_group, *groups)]


def _undone(tree: ConfigTree, recorded: list[Override], new: list[Override]) -> set[int]:
    """Return the places of ``recorded`` overrides that delete, or set to null, what ``new`` ones set, add, choose or
    delete, and of other ones of the same keys that the new ones replace.
    """
    chosen = {f"{o.key_or_group}.{name}" for o in new if tree.options(o.key_or_group) for name in named_options(o)}
    undone = set[int]()
    for place, deletion in enumerate(recorded):
        key = deletion.key_or_group
        if not deletion.is_delete() and deletion.value() is not None:
            continue
        of_key = [i for i, o in enumerate(recorded) if is_subkey(o.key_or_group, key)]
        later = [i for i in of_key if i > place]
        first = next((i for i in of_key if _is_whole(deletion, [recorded[i]])), place)
        of_new = [o for o in new if is_subkey(o.key_or_group, key)]
        if any(o.is_delete() and o.key_or_group == key for o in of_new):
            undone |= {place, *later}
        if first < place and any(map(adds, of_new)):
            undone |= {i for i in of_key if first <= i <= place}
        sets = any(not adds(o) and not o.is_delete() for o in of_new)
        if key in chosen or (sets and not later):
            undone.add(place)
    return undone


def _entry(override: Override) -> str:
    """Return the key below a group that ``override`` is at or below, as ``logger.csv``."""
    return ".".join(override.key_or_group.split(".")[:2])


def _is_whole(override: Override, overrides: Iterable[Override]) -> bool:
    """Return whether ``overrides`` add the entry of ``override`` or its class, so that it needs none of an option."""
    return any(adds(o) and o.key_or_group in (_entry(override), f"{_entry(override)}._target_") for o in overrides)


def _stable_folder(tree: ConfigTree, overrides: list[Override], training: bool) -> Path:
    """Return the run's folder for ``ckpt=auto``, which must be the same when the command is given again."""
    cfg = tree.compose([str(o.input_line) for o in overrides if o.key_or_group != "ckpt"])
    pattern: Any = OmegaConf.to_container(cfg.hydra.run, resolve=False)
    rule = "" if training else "it continues a training run. Use ckpt=last or ckpt=best for other tasks"
    if not rule and ("${launched:" in pattern["dir"] or "${now:" in pattern["dir"]):
        rule = "it needs a folder that the same command finds again, and this one's name has the time in it. Name one "
        rule += "with hydra.run.dir=<folder>"
    if rule:
        raise UserError(f"ckpt=auto is invalid: {rule}.")
    with resolvable(cfg):
        return Path(cfg.hydra.run.dir)


def _begin(tree: ConfigTree, overrides: list[Override], folder: Path) -> Resumed:
    """Start a run in a folder that has no checkpoint, also in what the same command left when it was killed.

    It is the same if only keys differ that may change in a resume, and it began with the base model.
    """
    _check_not_trained(folder)
    lines = [str(o.input_line) for o in overrides if o.key_or_group != "ckpt"]
    may_change = _resumable_keys(tree.compose(lines))
    recorded = _recorded_overrides(tree, folder)
    before, now = (
        [str(o.input_line) for o in command if not _may_change(_dotted(o), may_change)]
        for command in (recorded, overrides)
    )
    same = (folder / RECORDED_OVERRIDES).is_file() and before == now and not _is_branch(folder, recorded)
    message = f"ckpt=auto: {folder} has no checkpoint, so the run begins"
    return Resumed(lines, folder=folder.resolve() if same else None, training=True, message=message)


def _is_branch(folder: Path, recorded: Iterable[Override]) -> bool:
    """Return whether the run in ``folder``, with these overrides, began with the checkpoint of another one."""
    starts = [override.value() for override in recorded if override.key_or_group == "ckpt"]
    return any(start is not None and run_of(Path(str(start))) != folder.resolve() for start in starts)


def _last_checkpoint(tree: ConfigTree, folder: Path) -> Path:
    if not (folder / LAST).is_file():
        check_free(folder)
        _check_not_trained(folder)
        if not (folder / RECORD).is_dir():
            below = [path.parent for path in folder.glob(f"*/{RECORD}")]
            hint = f", such as {max(below, key=lambda run: run.stat().st_mtime)}" if below else ""
            rule = f"{folder} is no run's folder, as it has no {RECORD}" if folder.is_dir() else f"there is no {folder}"
            raise UserError(f"ckpt=last is invalid here: {rule}. Name the folder of a run with hydra.run.dir{hint}.")
        recorded = _recorded_overrides(tree, folder)
        is_branch = _is_branch(folder, recorded)
        overrides = [override for override in recorded if is_branch or override.key_or_group != "ckpt"]
        lines = [*finding(tree.own_sources or _recorded_sources(folder)), *(str(o.input_line) for o in overrides)]
        in_place = ["ckpt=auto", path_option("hydra.run.dir", folder)]  # which begins with the base model
        again = " ".join([*map(shell_quoted, lines), *([] if is_branch else in_place)])
        raise UserError(
            f"ckpt=last continues the run in {folder}, which has no {LAST}: it was stopped before its first "
            f"checkpoint. Begin it again with {again}."
        )
    return folder / LAST


def _check_not_trained(folder: Path) -> None:
    """Raise UserError for a run without ``last.ckpt`` that has a result, which beginning again would replace.

    One that was interrupted before its first checkpoint has a result of few iterations, which its repetition replaces.
    """
    result = next((folder / name for name in ("lora", "transformer") if (folder / name).is_dir()), None)
    if result is not None and read_summary(folder).get("last_checkpoint_iterations", 0) is not None:
        best = path_option("ckpt", folder / BEST)
        lora = _from_lora(result) if result.name == "lora" else "Begin a new run with hydra.run.dir=<folder>"
        fix = f"Branch from its best evaluation with {best}" if (folder / BEST).is_file() else lora
        raise UserError(f"The run in {folder} has trained, and its {LAST} was removed: {result} is left. {fix}.")


def _newest_checkpoint(name: Path) -> tuple[Path, bool]:
    """Return the checkpoint ``name`` of the newest run, and whether it belongs to this working directory.

    That is of the runs that were started in this working directory or lie in its outputs/; if there are none, of all
    that were started on this machine. A copy of a run that is still there, as a backup, counts only by its name.
    """
    runs = started_runs()
    places = (place for depth in range(5) for place in OUTPUTS.glob("*/" * depth + LAST.parent.name))
    here = [place.parent for place in places]  # behind links, too, which rglob does not follow
    here += [folder for folder, cwd in runs if cwd == Path.cwd()]
    for folders, is_here in ((here, True), ([folder for folder, _ in runs], False)):
        times = {f: max(map(os.path.getmtime, files)) for f in folders if (files := _checkpoints(f))}
        if times:
            newest_first = sorted(times, key=lambda folder: times[folder], reverse=True)
            newest = next((folder for folder in newest_first if not _is_copy(folder)), newest_first[0])
            if (newest / name).is_file():
                return newest / name, is_here
            rule = f"the newest run, {newest}, has no {name}"
            break
    else:
        rule = f"no run with {name} is in the record of those started on this machine, nor under {OUTPUTS.resolve()}"
    raise UserError(f"ckpt={name.stem} is invalid: {rule}. Name a file with ckpt=<file>.")


def _is_copy(folder: Path) -> bool:
    """Return whether the run in ``folder`` has recorded another folder as its own, which has its checkpoint still."""
    recorded = OmegaConf.select(_recorded_hydra(folder), "runtime.output_dir", default=str(folder))
    return os.path.realpath(recorded) != os.path.realpath(folder) and (Path(recorded) / LAST).is_file()


def _checkpoints(folder: Path) -> list[Path]:
    return [folder / name for name in (LAST, BEST) if os.path.isfile(folder / name)]


def check_sweep(folder: Path, checkpoint: Path) -> None:
    """Raise UserError if the run in ``folder``, which has ended and which no option names, is a job of a sweep."""
    mode = _recorded_hydra(folder).get("mode")
    if mode == RunMode.MULTIRUN.name or any((parent / "multirun.yaml").is_file() for parent in folder.parents):
        raise UserError(
            f"ckpt=last is invalid: the newest run, {folder}, is a job of a sweep that has ended, and would no longer "
            f"be comparable. Name it with ckpt=last {path_option('hydra.run.dir', folder)}, or begin a new folder with "
            f"{path_option('ckpt', checkpoint)}."
        )


def _check_resumable(
    tree: ConfigTree, folder: Path, checkpoint: Path, overrides: Sequence[Override], lines: Sequence[str]
) -> None:
    """Raise UserError if a key that must stay fixed has another value in ``lines`` than in the record of the run in
    ``folder``: by one of the new ``overrides``, by an edited file or by another version of the package.

    A key is changed if it is written in another way and has another value: neither a value that only follows another
    key, nor a default that is written out, is a change. A key that only a newer version
    has is none, either.
    """
    recorded = read_record(folder / RECORDED_CONFIG, DictConfig, "seed")
    current = tree.compose([line for line in lines if not tree.parse([line])[0].is_sweep_override()])
    at_start = recorded_digests(folder)
    may_change = _resumable_keys(recorded)
    with resolvable(current):
        before, now = (_fixed_values(cfg, folder, may_change) for cfg in (recorded, current))
    suspects = [o for o in overrides if not _may_change(_dotted(o), may_change)]
    added = [key for key in now.keys() - before.keys() if is_subkey(key, *map(_dotted, suspects))]
    both = [key for key in now if key in before]
    moved = [k for k in both if k in at_start and at_start[k] != digest(now[k][1])]
    fixed = [k for k in both if k not in at_start and before[k][0] != now[k][0] and before[k][1] != now[k][1]]
    changed = sorted([*added, *moved, *fixed])
    if not changed:
        return
    named = [o for o in suspects if is_subkey(_dotted(o), *changed) or any(is_subkey(k, _dotted(o)) for k in changed)]
    culprits = named or suspects  # an experiment changes keys of any name
    examples = f"{', '.join(changed[:3])}{' and more' if len(changed) > 3 else ''}"
    if not culprits:
        key, *_ = changed
        change = f"{key}={before[key][0]} is {now[key][1]} now, and was another value when the run began"
        fix = "Set it as it was"
        if key not in moved:
            change = f"{key}={now[key][1]} is not the {before[key][1]} that the run has recorded, by an edited file or "
            change, fix = f"{change}another version of solrl_lightning", f"Write {key}={before[key][1]}"
        raise UserError(
            f"Cannot resume {folder}: {change} (changed: {examples}). {fix}, or start a new folder from that state: "
            f"{path_option('ckpt', checkpoint)}."
        )
    again = [shell_quoted(line) for line in [*finding(tree.own_sources), *(str(o.input_line) for o in overrides)]]
    if any(o.key_or_group == "model" for o in culprits) and recorded.model.pretrained != current.model.pretrained:
        way_out = f"begin a run of that model without ckpt: {' '.join(again)}"
    else:
        trained = recorded_contents(checkpoint) or (0, 0.0)
        again += _longer(*trained, current.iterations, current.max_seconds or math.inf)
        way_out = f"start a new folder from that state: {path_option('ckpt', checkpoint)} {' '.join(again)}"
    raise UserError(
        f"Cannot resume {folder}: {_listed(culprits)} changes {examples}. Leave it out, or {way_out}. Keys that may "
        f"change: {_LISTED_KEYS}."
    )


def _resumable_keys(cfg: DictConfig) -> list[str]:
    """Return `RESUMABLE_KEYS` and, as the servers of a run of ``cfg`` may move, the keys of its rewards that say how to
    reach them.
    """
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    nodes = tree["reward"].items() if isinstance(tree["reward"], dict) else ()
    servers = [name for name, node in nodes if isinstance(node, dict) and node.get("_target_") in (HTTP, VLM)]
    return [*RESUMABLE_KEYS, *(f"reward.{name}.{key}" for name in servers for key in _SERVER_KEYS)]


def _fixed_values(cfg: DictConfig, folder: Path, may_change: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return, by dotted key, the value as written and as resolved in ``folder``, of the keys that a resume keeps."""
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.run_dir = str(folder)
        for key in ("hydra", "callbacks", "logger", "task"):  # all of whose keys may change
            cfg.pop(key, None)
    written, resolved = (leaves(OmegaConf.to_container(cfg, resolve=resolve)) for resolve in (False, True))
    fixed = (key for key in sorted(resolved) if not _may_change(key, ["run_dir", *may_change]))
    return {key: (written.get(key), resolved[key]) for key in fixed}


def _may_change(key: str, keys: Sequence[str]) -> bool:
    return is_subkey(key, *keys) and key not in _CLIPPING


def record_digests(cfg: DictConfig) -> None:
    """Record, at the start of the run of ``cfg``, digests of the fixed values that its record only refers to.

    Such a value is of the environment (``${oc.env:...}``), and may be a secret.
    """
    folder = Path(cfg.run_dir)
    values = _fixed_values(cfg, folder, _resumable_keys(cfg))
    digests = {key: digest(value) for key, (text, value) in values.items() if _OUTSIDE.search(str(text))}
    if digests and (folder / RECORD).is_dir() and not (folder / LAST).is_file():
        (folder / RECORD / _DIGESTS).write_text(json.dumps(digests))


def recorded_digests(folder: Path) -> dict[str, str]:
    """Return what `record_digests` has recorded of the run in ``folder``, by dotted key."""
    file = folder / RECORD / _DIGESTS
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values by dotted key; a list is one value."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= leaves(value, f"{prefix}.{key}" if prefix else str(key))
    return values


def _dotted(override: Override) -> str:
    return override.key_or_group.replace("/", ".")


def _listed(overrides: Iterable[Override | str]) -> str:
    return " ".join(o if isinstance(o, str) else str(o.input_line) for o in overrides) or "nothing"


# What a run has recorded


def _recorded_overrides(tree: ConfigTree, folder: Path) -> list[Override]:
    file = folder / RECORDED_OVERRIDES
    lines = as_written(read_record(file, ListConfig)) if file.is_file() else []
    return tree.parse(line for line in lines if not line.endswith("={}"))  # older versions took it, without effect


def _recorded_sources(folder: Path) -> list[str]:
    """Return where the run in ``folder`` had options of its user's from."""
    hydra = _recorded_hydra(folder)
    sources = own_sources(hydra) if hydra else []
    for source in sources:
        if source.startswith("file://") and not Path(source[7:]).is_dir():
            raise UserError(
                f"The run in {folder} had options from the folder {source[7:]}, which does not exist. Name their "
                "folder with --config-dir <folder>."
            )
    return sources


def _advice_to_go_back(folder: Path, overrides: Iterable[Override]) -> dict[str, str]:
    """Return where the run in ``folder`` began, for each relative path of ``overrides`` that exists only there."""
    place = OmegaConf.select(_recorded_hydra(folder), "runtime.cwd", default=".")
    return {
        path: f" The run began in {place}, where {shell_quoted(path)} is: run cd {shell_quoted(place)} first."
        for path in filter(None, (str(override.value()) for override in overrides))
        if os.path.exists(os.path.join(place, path)) and not os.path.exists(path)
    }


def _recorded_hydra(folder: Path) -> DictConfig:
    """Return Hydra's own part of the configuration of the run in ``folder``; empty without a record of it."""
    file = folder / RECORD / "hydra.yaml"
    hydra: DictConfig = read_record(file, DictConfig, "hydra").hydra if file.is_file() else OmegaConf.create({})
    return hydra


def read_record(file: Path, kind: type[ListConfig] | type[DictConfig], key: str | None = None) -> Any:
    """Load the content of ``file``, of a ``kind`` that has ``key``. UserError if it is damaged or missing."""
    try:
        record = OmegaConf.load(file)
        damaged = "" if isinstance(record, kind) and (key is None or key in record) else "unexpected content"
    except (YAMLError, OmegaConfBaseException, OSError, ValueError) as error:  # OSError for a number
        damaged = " ".join(str(error).split())
    if damaged:
        raise UserError(
            f"{file}, the record of the run's command line, is damaged: {damaged}. Restore it. Tasks other than "
            "training take a copy of the checkpoint outside of that folder, with all of that command line beside ckpt."
        )
    return record


# Checkpoints


def check_checkpoint(file: Path) -> None:
    """Raise UserError for a file that is missing or damaged. Unpickles nothing."""
    if not file.is_file():
        kind = "it is a folder" if file.is_dir() else "there is no such file"
        raise UserError(f"ckpt={file} is invalid: {kind}. {_checkpoint_near(file)}.")
    check_fetched(file, f"ckpt={file} is invalid")
    if file.suffix == ".safetensors":
        raise UserError(f"ckpt={file} is invalid: it must be a checkpoint of a run. {_from_lora(file)}.")
    others = [name for name in (BEST, LAST) if name.name != file.name and (file.parent / name.name).is_file()]
    fix = f"Take {path_option('ckpt', file.parent / others[0].name)}" if others else "Take another checkpoint"
    try:
        with zipfile.ZipFile(file) as archive:
            damage = archive.testzip()  # torch.load with mmap reads no checksums
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        damage = str(error)
    if damage:
        raise UserError(f"The checkpoint {file} is damaged or cut short ({damage}). {fix}, or start the run again.")


def _checkpoint_near(path: Path) -> str:
    """Return a fix for a ``path`` that is no file: a checkpoint of that run, or how to use the folder of a LoRA."""
    if lora_file(path):
        return _from_lora(path)
    folder = next((each for each in (path, *path.parents) if _checkpoints(each)), None)
    if folder is None:
        return "Name a checkpoint file, or use ckpt=last"
    return f"Use {' or '.join(path_option('ckpt', file) for file in _checkpoints(folder))}"


def _from_lora(path: Path) -> str:
    return f"If it is a LoRA, set {path_option('model.init_lora', path)} in place of ckpt"


def recorded_contents(checkpoint: Path) -> tuple[int, float] | None:
    """Return what `check_contents` does by the summary of the run, without torch; None if that is not known.

    The summary of a finished run is written after its last checkpoint, so a newer file is another one.
    """
    folder = run_of(checkpoint)
    summary = read_summary(folder)
    rows = summary.get("evaluations") or [{}]
    done, seconds = summary.get("iterations"), rows[-1].get("seconds", 0.0)
    if not isinstance(done, int) or not isinstance(seconds, int | float):
        return None
    whole = summary["status"] in FINISHED and summary.get("last_checkpoint_iterations") == done
    if not whole or os.path.realpath(checkpoint) != os.path.realpath(folder / LAST):
        return None
    is_newer = os.path.getmtime(checkpoint) > os.path.getmtime(folder / "summary.json")
    return None if is_newer else (done, seconds)


def check_contents(ckpt: Path) -> tuple[int, float]:
    """Return the iterations and seconds that a checkpoint's run has trained; UserError for other contents."""
    from solrl_lightning.artifacts.files import iterations_done, loop_state, read_checkpoint  # imports torch

    checkpoint = read_checkpoint(ckpt)
    return iterations_done(checkpoint), loop_state(checkpoint).get("seconds", 0.0)


def check_left(ckpt: Path, done: int, seconds: float, iterations: float, max_seconds: float) -> None:
    """Raise UserError for a checkpoint whose run has trained for all its ``iterations`` or ``max_seconds``."""
    if longer := _longer(done, seconds, iterations, max_seconds):
        option = path_option("ckpt", ckpt)
        raise UserError(
            f"{option} is invalid: a resumed run needs something left to do, and this one has done "
            f"{counted(done, 'iteration')}. Raise its length, as in {' '.join(longer)}, or write the LoRA with "
            f"task=export {option}."
        )


def _longer(done: int, seconds: float, iterations: float, max_seconds: float) -> list[str]:
    """Return the overrides that leave something to train after ``done`` iterations and ``seconds``; none if it is."""
    spent = {"iterations": (done, iterations), "max_seconds": (seconds, max_seconds)}
    return [f"{key}={value + 10:.0f}" for key, (value, limit) in spent.items() if value >= limit]
