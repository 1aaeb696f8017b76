"""Objects from the ``_target_`` of a configuration, with errors that name the key."""

import inspect
from collections.abc import Callable, Collection
from pkgutil import resolve_name
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from solrl_lightning.errors import UserError, sentence
from solrl_lightning.options.nodes import check_node


def make(key: str, node: Any, *arguments: Any, takes: str = "", kind: type = object, **options: Any) -> Any:
    """Instantiate ``node``, the value of ``key``, with the positional ``arguments`` and ``options``.

    Args:
        takes: what those arguments are, for the error message.

    Raises:
        UserError: it has no _target_, Python does not find that, it does not take its keys, or it makes another kind.
    """
    target = locate(key, node)
    positional = [*inspect.signature(target).parameters][: len(arguments)]
    check_node(key, target, node, {*positional, *options})
    try:
        instance = instantiate(node, *arguments, **options)
    except InstantiationException as error:
        cause: BaseException = error.__cause__ or error
        if isinstance(cause, UserError):
            raise
        reason = " ".join(str(cause).partition("full_key:")[0].split()).rstrip(".?")
        if inspect.isabstract(target):
            fix = f"Define {', '.join(sorted(target.__abstractmethods__))} in it."  # type: ignore[attr-defined]
        elif isinstance(cause, TypeError):  # Python's, about arguments
            fix = (
                f"It must take {takes}{takes and ' and '}the keys beside _target_. Leave a key out with ~{key}.<name>, "
                f"add one with +{key}.<name>=<value>."
            )
        else:
            fix = f"Correct the values below {key}."
        raise UserError(f"{key}: {node['_target_']} could not be made: {reason}. {fix}") from error
    if not isinstance(instance, kind):
        raise UserError(f"{key}: {node['_target_']} is invalid: it must be a {kind.__module__}.{kind.__qualname__}.")
    return instance


def locate(key: str, node: Any) -> Callable[..., Any]:
    """Return the class or function that ``node``, the value of ``key``, names. Raises UserError."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise UserError(f"{key}={node} is invalid: it must have a _target_, a class that Python finds.")
    name = node["_target_"]
    cause: Exception | None = None
    try:
        target = resolve_name(str(name))
        reason = f"{target!r} cannot be called"
        _ = callable(target) and inspect.signature(target)  # classes of C may have none
    except Exception as error:  # of a module of the user's own, any
        target, reason, cause = None, sentence(error).rstrip("."), error
    if not callable(target):
        fix = "Name a class that Python finds; where it is your own, with PYTHONPATH=<folder of your module>."
        lacks = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if isinstance(cause, ImportError | SyntaxError) and not f"{name}.".startswith(f"{lacks}."):
            fix = "Correct its module, or install what that imports."
        raise UserError(f"{key}: {name} could not be made: {reason}. {fix}") from cause
    return target


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


def check_optimizer(node: Any) -> None:
    """Raise UserError for an optimiser that cannot be made."""
    lora, kind = torch.nn.Parameter(torch.zeros(2, 2)), torch.optim.Optimizer
    make("optimizer", node, [lora], _partial_=False, takes="a list of parameters", kind=kind)


def check_objective(node: Any, steps: int, scale: float) -> None:
    """Raise UserError for an objective that cannot be made, or that cannot train in ``steps`` with this ``scale``."""
    from solrl_lightning.objectives import base

    objective = make("objective", node, kind=base.Objective)
    base.check_objective(objective, steps)
    if scale != 1 and not objective.guided_training:
        raise UserError(
            f"model.guidance_scale={scale} is invalid: the loss of objective={type(objective).__name__} is that of the "
            "velocity without guidance, and guided images are not samples of that policy. Set model.guidance_scale=1; "
            "task=evaluate, generate and audit take any scale."
        )
