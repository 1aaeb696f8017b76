"""The options of a node with a ``_target_``: the parameters of its class or function, checked by their annotations.

An annotation is checked if it is bool, int, float, str, a literal, a list, a rule of ``rules``, a TypedDict, or one of
these or None. Other annotations take any value. So an option of a class is a parameter, and nothing else.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field, ValidationError, create_model
from typing_extensions import is_typeddict

from solrl_lightning.errors import UserError, did_you_mean, nearest
from solrl_lightning.options.rules import Group, explain, written

_LISTED = 15  # options of a class in an error
_PLAIN = {bool, int, float, str, NoneType, list}


def check_node(key: str, target: Callable[..., Any], node: Mapping[str, Any], provided: Collection[str] = ()) -> None:
    """Check the values of ``node`` against the parameters of its ``target``.

    Args:
        key: of the node, for errors.
        provided: parameters that the program sets, whatever the node says.

    Raises:
        UserError: a key is unknown or missing, or a value is invalid.
    """
    values = {name: value for name, value in node.items() if not name.startswith("_") and name not in provided}
    fields, takes_all = _fields(target)
    known = [name for name in fields if name not in provided]
    for name in [] if takes_all else [name for name in values if name not in fields]:
        takes = f"{target.__name__} takes {', '.join(known)}. " if 0 < len(known) <= _LISTED else ""
        fix = did_you_mean(nearest(name, known)).strip() or f"{takes}Leave it out with ~{key}.{name}."
        raise UserError(f"{key}.{name}={written(values[name])} is invalid: nothing reads that key. {fix}")
    checked = {name: fields[name] for name in known if not _is_node(values.get(name))}
    try:
        _model(checked).model_validate({name: values[name] for name in values.keys() & checked})
    except ValidationError as error:
        first = error.errors()[0]
        raise explain({**first, "loc": (*key.split("."), *first["loc"])}) from None


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


def _model(fields: Mapping[str, tuple[Any, bool]]) -> type[Group]:
    """Return a model of fields by name: their type, and whether they are required. An attribute has another name."""
    numbered: dict[str, Any] = {
        f"field_{number}": (kind, Field(alias=name) if required else Field(alias=name, default=None))
        for number, (name, (kind, required)) in enumerate(fields.items())
    }
    return create_model("Options", __base__=Group, **numbered)


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
    return annotation if annotation in _PLAIN or origin in (Annotated, Literal, list) else Any


def _is_node(value: Any) -> bool:
    """Return whether Hydra makes an object of ``value``."""
    return isinstance(value, Mapping) and "_target_" in value
