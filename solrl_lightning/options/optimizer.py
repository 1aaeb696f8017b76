"""``optimizer``: torch's classes do not say what their values must be."""

from typing import Annotated, Any

from typing_extensions import Required, TypedDict

from solrl_lightning.options.rules import NODE, NotNegative, Positive, must_be, number

_EPS = "a finite number of at least 1e-30, as float32 takes smaller ones for 0 and a step divides by it"


def are_decays(value: Any) -> bool:
    numbers = value if isinstance(value, list) else []
    return len(numbers) >= 2 and all(type(decay) in (int, float) and 0 <= decay < 1 for decay in numbers)


class Optimizer(TypedDict, total=False):
    """Arguments of an optimiser of the trained LoRA."""

    __pydantic_config__ = NODE  # type: ignore[misc]
    _target_: Required[str]
    _partial_: bool
    lr: Positive
    """Learning rate, multiplied by the factor of the scheduler."""
    betas: Annotated[
        list[float], must_be("a list of two numbers of at least 0 and below 1, such as [0.9, 0.999]", are_decays)
    ]
    """Decay of the two moments per step."""
    weight_decay: NotNegative
    eps: Annotated[float, number(_EPS, lambda value: value >= 1e-30)]
    """Added to the square root of the second moment."""
