"""Schedules of the learning rate, and EMA decays of the old policy and of the evaluation weights."""

import math
from collections.abc import Callable

from solrl_lightning.errors import UserError
from solrl_lightning.options.rules import NotNegative, Positive


def linear_ramp(start: int, slope: float, maximum: float) -> Callable[[int], float]:
    """Return a function that is 0 up to step `start`, then rises by `slope` per step up to `maximum`."""
    return lambda step: min(slope * max(step - start, 0), maximum)


# decay_type of the published code of DiffusionNFT and Sol-RL
DECAY_TYPES = {
    0: linear_ramp(start=0, slope=0.0, maximum=0.0),  # the old policy equals the policy
    1: linear_ramp(start=0, slope=0.001, maximum=0.5),  # default
    2: linear_ramp(start=75, slope=0.0075, maximum=0.999),
}
CUSTOM = 3


def old_policy_decay(
    decay_type: int = 1, start: int | None = None, slope: float | None = None, maximum: float | None = None
) -> Callable[[int], float]:
    """Return the decay d(iteration) of the update old <- d old + (1 - d) policy after each iteration.

    Types 0 to 2 are fixed (published), type 3 is a ramp given by `start`, `slope` and `maximum`. A constant d is the
    ramp start=-1, slope=d, maximum=d.

    Raises:
        UserError: the type is unknown, or has other values than it takes.
    """
    if decay_type in DECAY_TYPES and start is slope is maximum is None:
        return DECAY_TYPES[decay_type]
    if decay_type == CUSTOM and start is not None and slope is not None and maximum is not None:
        if slope >= 0 and 0 <= maximum < 1:  # a decay of 1 would freeze the old policy
            return linear_ramp(start, slope, maximum)
    raise UserError(
        f"old_policy.decay_type={decay_type} with start={start}, slope={slope} and maximum={maximum} is invalid: it "
        f"must be 0, 1 or 2 without any of them, or {CUSTOM} with all, slope at least 0 and maximum in [0, 1). Set "
        "old_policy.decay_type=1, or old_policy.<name>=<value>."
    )


def ema_decay(step: int) -> float:
    """Return the decay of the evaluation weights after optimiser step 1, 2, ...: 2/11, 3/12, ... up to 0.9."""
    return min((1 + step) / (10 + step), 0.9)


Factor = Callable[[float], float]
"""Finished iterations (a fraction between optimiser steps of one iteration) -> factor of the learning rate."""


def constant(warmup: NotNegative = 0) -> Factor:
    """Return factor 1 after a linear rise that starts above 0.

    Args:
        warmup: iterations of the rise.
    """
    return lambda done: _risen(done, warmup)


def linear(iterations: Positive, warmup: NotNegative = 0) -> Factor:
    """Return a factor that falls linearly from 1, after the warm-up, to 0 at ``iterations``.

    Args:
        warmup: iterations of linear rise.
    """
    return lambda done: _risen(done, warmup) * (1 - _progress(done, iterations, warmup))


def cosine(iterations: Positive, warmup: NotNegative = 0) -> Factor:
    """Return a factor that falls along half a cosine from 1, after the warm-up, to 0 at ``iterations``.

    Args:
        warmup: iterations of linear rise.
    """
    return lambda done: _risen(done, warmup) * (1 + math.cos(math.pi * _progress(done, iterations, warmup))) / 2


def _risen(done: float, warmup: float) -> float:
    return (done + 1) / (warmup + 1) if done < warmup else 1.0


def _progress(done: float, iterations: float, warmup: float) -> float:
    return min(max(done - warmup, 0.0) / max(iterations - warmup, 1e-9), 1.0)
