"""EMA decay schedules of the old policy and of the evaluation weights."""

from collections.abc import Callable
from dataclasses import dataclass

from solrl_lightning.errors import UserError


@dataclass(frozen=True)
class LinearRamp:
    """0 up to step `start`, then `slope` per step up to `maximum`."""

    start: int
    slope: float
    maximum: float

    def __call__(self, step: int) -> float:
        return min(self.slope * max(step - self.start, 0), self.maximum)


# The published types of DiffusionNFT and Sol-RL, by number.
DECAY_TYPES = {
    0: LinearRamp(start=0, slope=0.0, maximum=0.0),  # the old policy is the policy
    1: LinearRamp(start=0, slope=0.001, maximum=0.5),  # the default
    2: LinearRamp(start=75, slope=0.0075, maximum=0.999),
}
CUSTOM = 3


def old_policy_decay(
    decay_type: int = 1, start: int | None = None, slope: float | None = None, maximum: float | None = None
) -> Callable[[int], float]:
    """The decay d(step) of old <- d old + (1 - d) policy, after each iteration.

    Types 0 to 2 are fixed tables. Type 3 is the ramp given by `start`, `slope` and `maximum`; a constant d is the
    ramp start=-1, slope=d, maximum=d. d = 1 would freeze the sampling policy, so `maximum` stays below it.
    """
    given = {"start": start, "slope": slope, "maximum": maximum}
    if decay_type in DECAY_TYPES:
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise UserError(
                f"decay type {decay_type} is a fixed table; {', '.join(extra)} belong to type {CUSTOM}: "
                f"remove them or set decay_type={CUSTOM}"
            )
        return DECAY_TYPES[decay_type]
    if decay_type != CUSTOM:
        raise UserError(f"the old policy's decay_type must be 0, 1, 2 or {CUSTOM}; got {decay_type}")
    if start is None or slope is None or maximum is None:
        missing = [name for name, value in given.items() if value is None]
        raise UserError(f"decay type {CUSTOM} is a ramp by start, slope and maximum; set {', '.join(missing)} as well")
    if slope < 0 or not 0 <= maximum < 1:
        raise UserError(f"a decay ramp needs slope >= 0 and 0 <= maximum < 1; got slope={slope}, maximum={maximum}")
    return LinearRamp(start, slope, maximum)


def ema_decay(step: int) -> float:
    """The decay of the average that is evaluated and saved, after optimiser step `step` = 1, 2, ...: 2/11 up to 0.9."""
    return min((1 + step) / (10 + step), 0.9)
