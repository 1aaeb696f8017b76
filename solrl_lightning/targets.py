"""Objects from the ``_target_`` of a configuration, with errors that name the key.

The options of such a node are the parameters of its class or function, checked by their annotations: bool, int, float,
str, a literal, a list, a rule of ``options.rules``, a TypedDict, or one of these or None. Other annotations take any
value. So an option of a class is a parameter, and nothing else.
"""

import inspect
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from importlib import import_module
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from pydantic import Field, ValidationError, create_model
from typing_extensions import is_typeddict

from solrl_lightning.errors import UserError, causes_of, did_you_mean, is_of_machine, nearest, sentence
from solrl_lightning.names import is_packaged
from solrl_lightning.options.rules import DEFAULT, Group, explain, written

_LISTED = 15  # options of a class in an error
_PLAIN = {bool, int, float, str, NoneType, list}


def make(key: str, node: Any, *arguments: Any, takes: str = "", kind: type = object, **options: Any) -> Any:
    """Instantiate ``node``, the value of ``key``, with the positional ``arguments`` and ``options``.

    ``takes``: what those arguments are, for the error message. UserError if the node has no _target_, Python does not
    find that, it does not take its keys, or it makes another kind.
    """
    target = locate(key, node)
    positional = [*inspect.signature(target).parameters][: len(arguments)]
    check_node(key, target, node, {*positional, *options})
    try:
        # Lists, not OmegaConf's; of the arguments, Hydra would make dataclasses other objects.
        instance = instantiate(node, _partial_=True, _convert_="all")(*arguments, **options)
    except Exception as error:
        cause = error.__cause__ or error if isinstance(error, InstantiationException) else error
        if isinstance(cause, UserError) or is_of_machine(cause):
            raise cause from None
        words = str(cause).split()  # a KeyError's is a name alone
        reason = " ".join(words if len(words) > 1 else [f"{type(cause).__name__}:", *words]).rstrip(".?:")
        if inspect.isabstract(target):
            fix = f"Define {', '.join(sorted(target.__abstractmethods__))} in it."  # type: ignore[attr-defined]
        elif isinstance(cause, TypeError):  # Python's, about arguments
            fix = (
                f"It must take {takes}{takes and ' and '}the keys beside _target_. Leave a key out with ~{key}.<name>, "
                f"add one with +{key}.<name>=<value>."
            )
        else:
            fix = f"Correct the values below {key}."
        raise UserError(f"{key}: {node['_target_']} could not be made: {reason}. {fix}") from cause
    if not isinstance(instance, kind):
        raise UserError(f"{key}: {node['_target_']} is invalid: it must be a {kind.__module__}.{kind.__qualname__}.")
    return instance


def locate(key: str, node: Any) -> Callable[..., Any]:
    """Return the class or function that ``node``, the value of ``key``, names. Raises UserError."""
    name = node["_target_"]
    cause: Exception | None = None
    try:
        _import_module_of(str(name))
        target = resolve_name(str(name))
        reason = f"{target!r} cannot be called"
        _ = callable(target) and inspect.signature(target)  # classes of C may have none
    except Exception as error:  # of a custom module, any
        target, reason, cause = None, sentence(causes_of(error)[-1]).rstrip("."), error
    if not callable(target):
        fix = "Name a class that Python finds; where it is your own, with PYTHONPATH=<folder of your module>."
        if cause is not None and (place := _in_a_module(causes_of(cause)[-1])):
            reason, fix = f"{reason}, in {place}", "Correct its module, or install what that imports."
            if is_packaged(name):
                fix = "Reinstall the package of that file and what it imports, or remove it."
        raise UserError(f"{key}: {name} could not be made: {reason}. {fix}") from cause
    return target


def _import_module_of(name: str) -> None:
    """Import the module of a class or function; resolve_name takes an ImportError in it for a missing attribute."""
    try:
        import_module(name.rpartition(".")[0] or name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise


def _in_a_module(error: BaseException) -> str:
    """Return the place of the last module, outside of the import system, that raised it; empty if none ran."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def check_arguments(key: str, node: Any, provided: Collection[str] = ()) -> None:
    """Raise UserError unless the target of ``node``, the value of ``key``, takes its keys beside ``provided``."""
    check_node(key, locate(key, node), node, provided)


def check_factor(key: str, node: Any) -> None:
    """Raise UserError unless the target of ``node``, the value of ``key``, makes a function of the iterations done."""
    parameters = inspect.signature(locate(key, node)).parameters.values()
    keys = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    lacking = next((each.name for each in keys if each.default is each.empty and each.name not in node), None)
    if lacking is not None or not callable(make(key, node)):
        lack, fix = (f", which lack {lacking},", f", or add +{key}.{lacking}=<value>") if lacking else ("", "")
        raise UserError(
            f"{key}._target_={node['_target_']} is invalid: it is called with the keys beside _target_{lack} and must "
            f"return a function of the iterations done. Write def <name>(<keys>): return lambda done: <value>{fix}."
        )


def make_optimizer(node: Any) -> partial[torch.optim.Optimizer]:
    """Return the class of the optimiser of ``node``, which has been checked, with its keys as arguments."""
    made: partial[torch.optim.Optimizer] = instantiate(node, _convert_="all")
    return made


def check_optimizer(node: Any) -> None:
    """Raise UserError for an optimiser that cannot be made."""
    lora, kind = torch.nn.Parameter(torch.zeros(2, 2)), torch.optim.Optimizer
    make("optimizer", node, [lora], takes="a list of parameters", kind=kind)


def check_objective(node: Any, steps: int, scale: float) -> None:
    """Raise UserError for an objective that cannot be made, or that cannot train in ``steps`` with this ``scale``."""
    from solrl_lightning.objectives import base

    objective = make("objective", node, kind=base.Objective)
    base.check_objective(objective, steps)
    if scale != 1 and not objective.guided_training:
        raise UserError(
            f"model.guidance_scale={scale} is invalid: the loss of objective={type(objective).__name__} takes the "
            "velocity without guidance, and guided images are not samples of that policy. Set model.guidance_scale=1; "
            "task=evaluate, generate and audit take any scale."
        )


# The options of a node


def check_node(key: str, target: Callable[..., Any], node: Mapping[str, Any], provided: Collection[str] = ()) -> None:
    """Check the values of ``node`` against the parameters of its ``target``, without those that are ``provided``.

    UserError for a key that is unknown or missing, and for an invalid value.
    """
    values = {name: value for name, value in node.items() if not name.startswith("_") and name not in provided}
    fields, takes_all = _fields(target)
    known = [name for name in fields if name not in provided]
    for name in [] if takes_all else [name for name in values if name not in fields]:
        takes = f"{target.__name__} takes {', '.join(known)}. " if 0 < len(known) <= _LISTED else ""
        fix = did_you_mean(nearest(name, known)).strip() or f"{takes}Leave it out with ~{key}.{name}."
        raise UserError(f"{key}.{name}={written(values[name])} is invalid: nothing reads that key. {fix}")
    lacking = next((name for name in known if fields[name][1] and name not in values), None)
    if lacking is not None and not isinstance(target, type):
        raise UserError(
            f"{key}._target_={node['_target_']} is invalid: it is called with the keys beside _target_, which lack "
            f"{lacking}. Name a class, or a function that returns an object of one, or add +{key}.{lacking}=<value>."
        )
    nodes = [name for name, value in values.items() if isinstance(value, Mapping) and "_target_" in value]
    checked = tuple(name for name in known if name not in nodes)  # Hydra makes objects of nodes
    try:
        _model_of(target, checked).model_validate({name: values[name] for name in values.keys() & set(checked)})
    except ValidationError as error:
        first = error.errors()[0]
        named = explain({**first, "loc": (*key.split("."), *first["loc"])})
        if fields[str(first["loc"][0])][1] and not is_packaged(target.__module__):
            named = UserError(str(named).replace(DEFAULT, "Correct it."))  # where a user's file has it
        raise named from None


@cache
def _fields(target: Callable[..., Any]) -> tuple[dict[str, tuple[Any, bool]], bool]:
    """Return the checked type of each parameter and whether it is required, and whether any other name is taken."""
    parameters, hints = inspect.signature(target).parameters.values(), _hints(target)
    fields = {
        each.name: (_checked(hints.get(each.name)), each.default is each.empty)
        for each in parameters
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    return fields, any(each.kind == each.VAR_KEYWORD for each in parameters)


@cache
def _model_of(target: Callable[..., Any], names: tuple[str, ...]) -> type[Group]:
    """Return a model of these parameters."""
    fields, _ = _fields(target)
    return _model({name: fields[name] for name in names})


class _Arguments(Group):
    """Those of a class or function, which may have a use for an empty text, as loggers have for ``version``."""

    takes_empty = True


def _model(fields: Mapping[str, tuple[Any, bool]]) -> type[Group]:
    """Return a model of fields by name: their type, and whether they are required. An attribute has another name."""
    numbered: dict[str, Any] = {
        f"field_{number}": (kind, Field(alias=name) if required else Field(alias=name, default=None))
        for number, (name, (kind, required)) in enumerate(fields.items())
    }
    return create_model("Options", __base__=_Arguments, **numbered)


def _hints(target: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations of the parameters; none where a name is known to type checkers only."""
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}


def _checked(annotation: Any) -> Any:
    """Return ``annotation`` if it is checked, else Any."""
    if is_typeddict(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        return _model({name: (_checked(hint), name in annotation.__required_keys__) for name, hint in hints.items()})
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        kind = _checked(next(each for each in arguments if each is not NoneType))
        return Any if kind is Any else kind | None
    return annotation if annotation in _PLAIN or origin in (Annotated, Literal, list, dict) else Any
