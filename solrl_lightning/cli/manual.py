"""``--help <group>``: the options of a group with their values and what their classes say about them."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from solrl_lightning.cli.config import EXPERIMENT, without_hydra
from solrl_lightning.errors import UserError
from solrl_lightning.options.rules import UNCHECKED, Group, written
from solrl_lightning.options.run import Run
from solrl_lightning.targets import locate

_WIDTH, _INDENT = 110, "    "
_PROVIDED = "device"  # an argument that rewards get from the program


def describe_experiments(texts: Mapping[str, str]) -> str:
    """Return each experiment, which is of no group's keys alone, with the text of its file."""
    return "\n".join(f"{EXPERIMENT}={name}\n{textwrap.indent(text, _INDENT)}" for name, text in texts.items())


def manual(group: str, cfg: DictConfig) -> str:
    """Return the key and the value of each option of ``group`` in a composed configuration, with its description."""
    if group not in Run.model_fields:
        raise UserError(f"--help {group} is invalid: the group is your own, so its files alone say what it has.")
    with without_hydra(cfg, ".") as application:
        options = Run.of(application, UNCHECKED)
    return "\n".join(_described(group, getattr(options, group), ""))


def _described(key: str, value: Any, text: str) -> Iterator[str]:
    """Yield the lines of ``value``, and of the keys of a group or of a node with a ``_target_``."""
    if isinstance(value, Group):
        kind, texts = type(value), attribute_texts(type(value))
        for name, field in kind.model_fields.items():
            if name not in kind.no_keys:
                each = getattr(value, name)
                leaf = each.get("_target_") if isinstance(each, dict) and "_target_" in each else each
                yield from _described(f"{key}.{field.alias or name}", leaf, texts.get(name, ""))
        for name, each in (value.model_extra or {}).items():
            yield from _described(f"{key}.{name}", each, "")
    elif isinstance(value, dict) and "_target_" in value:
        target = locate(key, value)
        parameters, texts = inspect.signature(target).parameters, argument_texts(target)
        yield f"{key}: {value['_target_']}"
        text = inspect.cleandoc(target.__doc__ or "").partition("\n\n")[0]
        yield from _wrapped("" if text.startswith(f"{target.__name__}(") else text)  # a signature, of a dataclass
        optional = [name for name, each in parameters.items() if each.default is not each.empty]
        for name in dict.fromkeys([*value, *optional]):
            if not name.startswith("_") and name != _PROVIDED:
                default = parameters[name].default if name in parameters else None
                added = "" if name in value else "+"  # as the command line needs
                yield from _described(f"{added}{key}.{name}", value.get(name, default), texts.get(name, ""))
    elif isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
        for name, each in value.items():
            yield from _described(f"{key}.{name}", each, "")
    else:
        yield f"{key}={written(value)}"
        yield from _wrapped(text)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def attribute_texts(kind: type) -> dict[str, str]:
    """Return the strings below the annotated attributes of a class and of its bases, by name."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.partition(".")[0] in ("builtins", "pydantic", "typing"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for attribute, text in zip(body.body, body.body[1:], strict=False):
            match attribute, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    texts[name] = words
    return texts


def argument_texts(target: Callable[..., Any]) -> dict[str, str]:
    """Return the entries below ``Args:`` in the docstrings of a function, or of a class and its bases, by name."""
    texts: dict[str, str] = {}
    for each in reversed(target.__mro__) if isinstance(target, type) else [target]:
        for document in (each.__doc__, getattr(vars(each).get("__init__"), "__doc__", None)):
            _, _, arguments = inspect.cleandoc(document or "").partition("\nArgs:\n")
            for entry in re.split(r"\n(?= {4}\w)", f"\n{arguments.partition(chr(10) * 2)[0]}"):
                names, colon, words = entry.strip().partition(": ")
                texts |= {name: words for name in names.split(", ") if colon and name.isidentifier()}
    return texts
