"""``callbacks``: by name; those of the user's own have any keys."""

from typing import Annotated, Any

from pydantic import ValidatorFunctionWrapHandler, WrapValidator
from typing_extensions import Required, TypedDict

from solrl_lightning.options.rules import NODE, Count, CountOrZero, Images, NotNegative, Positive, Seed, Steps


class Callback(TypedDict, total=False):
    __pydantic_config__ = NODE  # type: ignore[misc]
    _target_: Required[str]
    """A class of Lightning's callbacks."""


class RankCorrelation(Callback, total=False):
    probe_every: CountOrZero
    """Iterations between unbiased probes; 0: none."""


class Limits(TypedDict, total=False):
    """Of the alarms; null: none."""

    __pydantic_config__ = NODE  # type: ignore[misc]
    fall: Positive | None
    """Standard errors of a held-out reward below its best."""
    lost_gain: NotNegative
    """Share of the best's gain over the base that is lost."""
    pictures: Positive | None
    """Standard deviations that brightness, saturation or edges have moved."""
    diversity: Positive | None
    """Share of the base's diversity that is lost."""
    kl: Positive | None
    """train/kl."""
    base_distance: Positive | None
    """policy/base_distance."""
    jump: Positive | None
    """Ranges of the loss or the gradient norm before."""
    drift: Count | None
    """Iterations in which the old policy is the trained one."""


class Guard(Callback, total=False):
    stop: bool
    """End the run at the first alarm."""
    patience: Count
    """Iterations before an alarm of constant or saturated rewards."""
    limits: Limits
    """Limits of the alarms."""


class SampleGrid(Callback, total=False):
    every: CountOrZero
    """Iterations between grids; 0: none."""
    prompts: Count
    """Number of held-out prompts."""
    seeds_per_prompt: Images
    """Images per prompt and model."""
    steps: Steps
    """Solver steps."""
    seed: Seed
    """Seed of the noise."""


class Best(Callback, total=False):
    monitor: str | None
    """Name of a held-out reward; null: the one that is trained on."""


class Periodic(Callback, total=False):
    every: CountOrZero
    """Iterations between checkpoints; 0: none."""
    keep: Count | None
    """Number of the newest ones to keep; null: all."""


class Callbacks(TypedDict, total=False):
    __pydantic_config__ = NODE  # type: ignore[misc]
    rank_correlation: RankCorrelation | None
    """Agreement of the proxy's ranking with that of BF16."""
    guard: Guard | None
    """Alarms of collapse and of exploited rewards."""
    sample_grid: SampleGrid | None
    """Pictures of the base and the current model."""
    best: Best | None
    """The checkpoint after the best evaluation."""
    periodic: Periodic | None
    """Checkpoints at equal distances."""


def _in_order(node: Any, check: ValidatorFunctionWrapHandler) -> Any:
    checked = check(node)  # pydantic puts the known ones first
    return {name: checked[name] for name in node}


InOrder = Annotated[Callbacks, WrapValidator(_in_order)]
"""Callbacks in the order of the files, in which they are called."""
