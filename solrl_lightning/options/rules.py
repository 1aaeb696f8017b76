"""What the values of a configuration must be, and the line that says so. Imports no torch."""

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationInfo, model_validator
from pydantic_core import ErrorDetails
from typing_extensions import Self

from solrl_lightning.errors import EMPTY, UserError, did_you_mean, nearest

MAX_SEED = 2**32 - 1
MAX_STEPS, MAX_IMAGES, MAX_ITERATIONS = 1000, 100_000, 100_000_000
DEFAULT = "Leave it out for the default."
_OTHER_TYPE = re.compile(r"[-+.\de]*|true|false|null", re.IGNORECASE)  # of a text that needs quotes to be one
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", re.IGNORECASE)
_WITHOUT_QUOTES = "A text is no number. Write it without quotes, and a variable as '\"${oc.decode:${oc.env:<name>}}\"'."
HERE = "<here>"
"""Stands for the key of what is checked, in a rule and its fix."""


class Broken(ValueError):
    """A broken rule, as a sentence; ``key`` is the value's key below the node that is checked."""

    def __init__(self, rule: str, key: str = "", fix: str = DEFAULT) -> None:
        super().__init__(rule)
        self.key, self.fix = key, fix


UNCHECKED = object()
"""The context of a validation that leaves the rules over several keys out."""


class Group(BaseModel):
    """A node of the configuration whose keys are all known."""

    guesses: ClassVar[bool] = False
    """Whether a custom key that is like a known one is a typing error."""
    no_keys: ClassVar[tuple[str, ...]] = ()
    """Fields that the program sets."""
    takes_empty: ClassVar[bool] = False
    """Whether a text may be empty."""
    model_config = ConfigDict(strict=True, extra="forbid", defer_build=True)  # at the first use, once for all below

    @model_validator(mode="before")
    @classmethod
    def check_keys(cls, node: Any) -> Any:
        """Tell an unknown key with the nearest known one, and a key without a value."""
        known = [field.alias or name for name, field in cls.model_fields.items() if name not in cls.no_keys]
        for name in [key for key in node if key not in known] if isinstance(node, dict) else ():
            near = did_you_mean(nearest(name, known))
            if near and cls.guesses:
                fix = f"{near.strip()} If it is a key of your own, choose another name."
                raise Broken("nothing in the package reads that key, and it resembles one.", name, fix)
            if cls.model_config.get("extra") == "forbid":
                raise Broken("nothing reads that key.", name, near.strip() or f"The keys here are {', '.join(known)}.")
        checked = known if isinstance(node, dict) and not cls.takes_empty else ()
        for name in [key for key in checked if node.get(key) == ""]:
            raise Broken(f"{EMPTY}.", name)
        return node

    @model_validator(mode="after")
    def check_rules(self, info: ValidationInfo) -> Self:
        if info.context is not UNCHECKED:
            self.check()
        return self

    def check(self) -> None:
        """Raise for a rule over several keys."""


def group_of(annotation: Any) -> type[Group] | None:
    """Return the class of a group's field, which may be null as well; None for other fields."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, Group)), None)


NODE = ConfigDict(strict=True, extra="allow")
"""Of a node with a ``_target_``, which stays a mapping: its class, or a custom one, may take other keys."""


def must_be(rule: str, holds: Callable[[Any], bool], fix: str = DEFAULT) -> PlainValidator:
    """Return the check of a value; it stays as it is, so that True, 1 and 1.0 remain three values."""

    def check(value: Any) -> Any:
        if not holds(value):
            is_quoted = isinstance(value, str) and _NUMBER.fullmatch(value) and holds(_as_number(value))
            raise Broken(f"it must be {rule}.", fix=_WITHOUT_QUOTES if is_quoted else fix)
        return value

    return PlainValidator(check)


def _as_number(text: str) -> int | float:
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def is_whole(value: Any, least: int = 1, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most  # bool is a subclass of int


def whole(least: int, most: float = math.inf, note: str = "") -> PlainValidator:
    bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"

    return must_be(f"a whole number {bounds}{note}", lambda value: is_whole(value, least, most))


def number(rule: str, holds: Callable[[float], bool], fix: str = DEFAULT) -> PlainValidator:
    return must_be(rule, lambda value: type(value) in (int, float) and math.isfinite(value) and holds(value), fix)


def is_one(*values: Any) -> Callable[[Any], bool]:
    """Return whether a value is one of these and of the same type: of batches, 1 is one and 1.0 is all."""
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def one_of(*choices: bool | str) -> PlainValidator:
    """Make a check where ``Literal`` does not do: it takes 1 and 1.0 for True."""
    return must_be(f"one of {', '.join(str(choice).lower() for choice in choices)}", is_one(*choices))


Node = Annotated[
    dict[str, Any],
    must_be(
        "a group of keys with a _target_, a class or function that Python finds",
        lambda value: isinstance(value, dict) and isinstance(value.get("_target_"), str),
        fix=f"Leave it out with ~{HERE}, also where an experiment sets keys of it, or add +{HERE}._target_=<class>.",
    ),
]
"""The arguments of a class or function; ``targets`` checks them where they are used."""
Count = Annotated[int, whole(1)]
CountOrZero = Annotated[int, whole(0)]
CountOrAuto = Annotated[
    int | Literal["auto"], must_be("a whole number of at least 1, or auto", lambda v: v == "auto" or is_whole(v, 1))
]
Steps = Annotated[int, whole(1, MAX_STEPS)]
Images = Annotated[int, whole(1, MAX_IMAGES)]
Iterations = Annotated[int, whole(1, MAX_ITERATIONS)]
Kept = Annotated[int, whole(2, note=": the best and the worst of a prompt are compared with each other")]
Seed = Annotated[int, whole(0, MAX_SEED)]
Positive = Annotated[float, number("a finite number above 0", lambda value: value > 0)]
NotNegative = Annotated[float, number("a finite number of at least 0", lambda value: value >= 0)]
Share = Annotated[float, number("a fraction above 0 and at most 1", lambda value: 0 < value <= 1)]
Level = Annotated[float, number("a noise level above 0 and below 1", lambda value: 0 < value < 1)]
Compile = Annotated[bool | Literal["auto"], one_of(True, False, "auto")]

_KINDS = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "list_type": "a list",
    "too_short": "a list with at least one entry",
    "dict_type": "a group of keys",
    "model_type": "a group of keys",
    "model_attributes_type": "a group of keys",
}


def is_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def explain(error: ErrorDetails) -> UserError:
    """Return ``error`` as `<key>=<value> is invalid: <rule> <fix>`."""
    context, value, path = error.get("ctx", {}), error["input"], [str(part) for part in error["loc"]]
    cause, home, in_list = context.get("error"), ".".join(path), any(map(str.isdigit, path))
    if isinstance(cause, UserError):
        return cause
    if error["type"] == "missing":
        in_file = "a file of your own may begin with `defaults: [<option>, _self_]`"
        fix = f" with +{home}=<value>, or leave out what removes it; {in_file}"
        return UserError(f"{home} is missing: a run needs it. Add it{'' if in_list else fix}.")
    if not isinstance(cause, Broken):
        choices = str(context.get("expected")).replace("'", "").replace(" or ", ", ")
        quotes = "; a number needs quotes" if error["type"] == "string_type" and isinstance(value, int | float) else ""
        cause = Broken(f"it must be {_KINDS.get(error['type'], f'one of {choices}')}{quotes}.")
    for part in filter(None, cause.key.split(".")):
        value = value.get(part) if isinstance(value, dict) else value[int(part)]
        path.append(part)
    fix = "Correct it." if in_list and cause.fix == DEFAULT else cause.fix  # an item of a list has no defaults
    rule = f"{cause} {fix}".replace(f"{HERE}.", f"{home}." if home else "").replace(HERE, home)
    return UserError(f"{'.'.join(path)}={written(value)} is invalid: {rule}")


def written(value: Any) -> str:
    """Return ``value`` as on a command line."""
    if isinstance(value, Group):
        return written(value.model_dump(exclude_unset=True))
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}:{written(each)}' for key, each in value.items())}}}"
    if isinstance(value, str) and _OTHER_TYPE.fullmatch(value):
        return f"'{value}'"
    words = {type(None): "null", bool: str(value).lower()}
    return words.get(type(value), str(value))
