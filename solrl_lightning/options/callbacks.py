"""``callbacks``: by name; those of the user's own have any keys."""

from typing import Annotated, Any

from pydantic import BeforeValidator, ValidatorFunctionWrapHandler, WrapValidator
from typing_extensions import Required, TypedDict

from solrl_lightning.options.rules import NODE, Count, CountOrZero, Group, Images, Positive, Seed, Steps


class Callback(TypedDict, total=False):
    __pydantic_config__ = NODE  # type: ignore[misc]
    _target_: Required[str]
    """A class of Lightning's callbacks."""


class RankCorrelation(Callback, total=False):
    probe_every: CountOrZero
    """Iterations between unbiased probes; 0: none."""


class Limits(Group):
    """Of the alarms; null: none."""

    fall: Positive | None
    """Standard errors of a held-out reward below its best."""
    diversity: Positive | None
    """Share of the base's diversity that is lost."""
    kl: Positive | None
    """train/kl."""
    drift: Count | None
    """Iterations in which the old policy is the trained one."""


def _limits(node: Any) -> Any:
    Limits.model_validate(node)
    return node  # the callback takes a mapping


class Guard(Callback, total=False):
    stop: bool
    """End the run at the first alarm."""
    patience: Count
    """Iterations before an alarm of constant or saturated rewards."""
    limits: Annotated[dict[str, Any], BeforeValidator(_limits)]
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


class Last(Callback, total=False):
    every: Count | None
    """Iterations between checkpoints; null: 1, or 10 for large ones."""


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
    checkpoint: Last | None
    """The checkpoint of the last iteration."""
    periodic: Periodic | None
    """Checkpoints at equal distances."""


def _in_order(node: Any, check: ValidatorFunctionWrapHandler) -> Any:
    checked = check(node)  # pydantic puts the known ones first
    return {name: checked[name] for name in node}


InOrder = Annotated[Callbacks, WrapValidator(_in_order)]
"""Callbacks in the order of the files, in which they are called."""
