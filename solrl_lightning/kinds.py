"""Kinds of values: a command line may not put a text where the chosen options have a number, or take a key away."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from solrl_lightning.config import ConfigTree
from solrl_lightning.errors import UserError

_ONE_EACH = ("task", "model", "data", "family", "objective", "precision", "trainer")  # groups of which a run has one
_DELETABLE = ("callbacks", "logger", "trainer", "reward", "optimizer", "objective", "model.quantization.exclude")
_OPEN = ("callbacks", "logger", "trainer")  # where their classes take several kinds, null among them
_OWN_RULES = ("task.prompts", "family.compile")  # in config.requested_prompts and check_values
_NULL_IN_SOME = ("family.explore", "family.warning", "model.variant")


def check_kinds(tree: ConfigTree, cfg: DictConfig) -> None:
    """UserError unless a run has one option of each group that it needs, and values of the kinds that those have.

    Args:
        cfg: as composed, with Hydra's own part.
    """
    for group in _ONE_EACH:
        if not isinstance(cfg.hydra.runtime.choices.get(group), str):
            raise UserError(f"A run needs a {group}; choose one with {group}=<option>.")
    arguments = list(cfg.hydra.overrides.task)
    choices = [str(o.input_line) for o in tree.parse(arguments) if tree.options(o.key_or_group)]
    if len(choices) < len(arguments):
        known, found = (OmegaConf.to_container(each, resolve=False) for each in (tree.compose(choices), cfg))
        _check("", known, found)


def _check(key: str, known: Any, found: Any) -> None:
    is_open = key.partition(".")[0] in _OPEN
    if isinstance(known, dict) and isinstance(found, dict):
        for name in known.keys() - {"hydra"}:
            inner = f"{key}.{name}" if key else str(name)
            if name in found:
                _check(inner, known[name], found[name])
            elif not inner.startswith(_DELETABLE):
                raise UserError(f"{inner} is missing: a run needs it. Leave ~{inner} out.")
        return
    expected, kind = _kind(known), _kind(found)
    if isinstance(known, list) and isinstance(found, list) and known and not is_open:
        if any(_kind(value) not in (_kind(known[0]), "a reference") for value in found):
            raise UserError(f"{key}={found} is invalid: each of the list must be {_kind(known[0])}. Leave it out.")
    scalar = kind in ("a text", "a number", "true or false")
    if kind == expected or "a reference" in (expected, kind) or key in _OWN_RULES:
        return
    if is_open and (found is None or expected in ("a text", "null")):  # devices=auto may also be a list
        return
    if (expected in ("a text", "null") and scalar) or (found is None and key in _NULL_IN_SOME):
        return
    if expected == "null" and (key == "family.explore" or key.startswith("task.")):  # lists, among others
        return
    rule = "a single value" if expected == "null" else expected
    default = "" if known is None or isinstance(known, dict | list) else f" for {key}={known}"
    raise UserError(f"{key}={'null' if found is None else found} is invalid: it must be {rule}. Leave it out{default}.")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str) and ("${" in value or value == "???"):  # its value is looked at elsewhere
        return "a reference"
    kinds = ((bool, "true or false"), (int | float, "a number"), (str, "a text"), (list, "a list"))
    return next((name for types, name in kinds if isinstance(value, types)), "a group of keys")
