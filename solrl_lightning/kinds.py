"""Kinds of values: a command line may not put a text where the chosen options have a number, or take a key away."""

from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from solrl_lightning.config import ConfigTree
from solrl_lightning.errors import UserError

_ONE_EACH = ("task", "model", "data", "family", "objective", "precision", "trainer")  # groups of which a run has one
_MADE = ("callbacks", "logger", "trainer")  # they refer to Hydra's own part, and null means something to Lightning
_OPTIONAL = (*_MADE, "reward", "optimizer")  # what they make has defaults of its own
_OWN_RULES = ("task.prompts", "family.compile")  # in config.asked_prompts and check_values
# Of keys that are null in the package's files, what else they may be.
_NULL = {
    "ckpt": "a text",
    "data.eval_prompts": "a number",
    "family.warning": "a text",
    "model.embeddings": "a text",
    "model.preview_decoder": "a text",
    "model.variant": "a text",
    "old_policy.maximum": "a number",
    "old_policy.slope": "a number",
    "old_policy.start": "a number",
    "reward.pretrained": "a text",
    "task.decoders": "a list",
    "task.precisions": "a list",
    "task.prompt_file": "a text",
    "task.speedup": "a number",
    "task.tflops": "a number",
}
_MAY_BE_NULL = ("family.explore", "family.warning", "model.variant")


def check_choices(cfg: DictConfig) -> None:
    """UserError unless a run, as composed with Hydra's own part, has one option of each group that it needs."""
    for group in _ONE_EACH:
        if not isinstance(cfg.hydra.runtime.choices.get(group), str):
            raise UserError(f"A run needs one {group}; choose it with {group}=<option>.")


def check_kinds(tree: ConfigTree, cfg: DictConfig) -> None:
    """UserError for a value of another kind than the one that the chosen options have in its place, or for none.

    Args:
        cfg: as composed, with Hydra's own part.
    """
    arguments = list(cfg.hydra.overrides.task)
    choices = [str(o.input_line) for o in tree.parse(arguments) if tree.options(o.key_or_group)]
    if len(choices) == len(arguments):
        return
    known: Any = tree.compose(choices)
    written: Any = OmegaConf.to_container(known, resolve=False)
    with open_dict(known):
        known.run_dir = ""
        for group in ("hydra", *_MADE):
            known.pop(group, None)
    resolved: Any = OmegaConf.to_container(known, resolve=True)
    made = {group: written.get(group) for group in _MADE}
    _check("", {**resolved, **made}, OmegaConf.to_container(cfg, resolve=False))


def _check(key: str, known: Any, found: Any) -> None:
    group = key.partition(".")[0]
    if isinstance(known, dict) and isinstance(found, dict):
        for name, value in known.items():
            inner = f"{key}.{name}" if key else str(name)
            if name in found:
                _check(inner, value, found[name])
            elif group not in _OPTIONAL and inner not in ("callbacks", "logger"):
                raise UserError(f"{inner} is missing: a run needs it. Leave ~{inner} out.")
        return
    if isinstance(known, list) and isinstance(found, list) and known:
        wrong = [value for value in found if _kind(value) not in (_kind(known[0]), "a reference")]
        if wrong and group not in _MADE:
            raise UserError(f"{key}={found} is invalid: each of the list must be {_kind(known[0])}. Leave it out.")
    expected, kind = _kind(known) if known is not None else _NULL.get(key), _kind(found)
    fits = kind == expected or (expected == "a text" and kind in ("a number", "true or false"))
    if expected is None or fits or key in _OWN_RULES or "a reference" in (expected, kind):
        return
    if found is None and (known is None or key in _MAY_BE_NULL):
        return
    if group in _MADE and (found is None or expected == "a text"):  # devices=auto, for example, may also be a list
        return
    shown = "null" if found is None else found
    default = "" if known is None or isinstance(known, dict | list) else f" for {key}={known}"
    raise UserError(f"{key}={shown} is invalid: it must be {expected}. Leave it out{default}.")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str) and ("${" in value or value == "???"):  # its value is looked at elsewhere
        return "a reference"
    kinds = ((bool, "true or false"), (int | float, "a number"), (str, "a text"), (list, "a list"))
    return next((name for types, name in kinds if isinstance(value, types)), "a group of keys")
