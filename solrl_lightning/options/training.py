"""``objective``, ``optimizer``, ``scheduler`` and ``old_policy``: what an optimiser step is made of."""

from typing import Annotated, Any

from typing_extensions import Required, TypedDict

from solrl_lightning.options.rules import NODE, Count, Finite, NotNegative, Positive, Share, must_be, number

_EPS = "a finite number of at least 1e-30, as float32 takes smaller ones for 0 and a step divides by it"


def are_decays(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) >= 2
        and all(type(decay) in (int, float) and 0 <= decay < 1 for decay in value)
    )


class Objective(TypedDict, total=False):
    """Arguments of a loss; each has some of these, one of the user's own also others."""

    __pydantic_config__ = NODE  # type: ignore[misc]
    _target_: Required[str]
    """A subclass of ``Objective``."""
    beta: Positive
    """Distance of v+ and v- from the old velocity."""
    strength: Positive
    """Strength of the reward in the target."""
    kl_weight: NotNegative
    """Weight of the distance to the base model."""
    old_weight: NotNegative
    """Weight of the distance to the old policy."""
    reference_every: Count
    """Micro-batches between those with the term of the base model."""
    advantage_clip: Positive
    """Bound of the advantages."""
    advantage_scale: Positive
    """Factor of the advantages."""
    ratio_clip: Positive
    """Bound of the likelihood ratios."""
    clip_range: Positive
    """Bound of the likelihood ratios."""
    noise_level: Positive
    """Noise of the stochastic steps."""
    eta: Positive
    """Noise of the stochastic steps."""
    window: Count | None
    """Number of consecutive stochastic steps; null: all but the last."""
    timestep_fraction: Share
    """Fraction of the noise levels that a sample is trained at."""


class Optimizer(TypedDict, total=False):
    """Arguments of an optimiser of the trained LoRA."""

    __pydantic_config__ = NODE  # type: ignore[misc]
    _target_: Required[str]
    """A class of torch.optim."""
    _partial_: bool
    """The parameters follow later."""
    lr: Positive
    """Learning rate, multiplied by the factor of the scheduler."""
    betas: Annotated[
        list[float], must_be("a list of two numbers of at least 0 and below 1, such as [0.9, 0.999]", are_decays)
    ]
    """Decay of the two moments per step."""
    weight_decay: NotNegative
    """Decoupled weight decay."""
    eps: Annotated[float, number(_EPS, lambda value: value >= 1e-30)]
    """Added to the square root of the second moment."""


class Scheduler(TypedDict, total=False):
    """Arguments of a learning rate schedule."""

    __pydantic_config__ = NODE  # type: ignore[misc]
    _target_: Required[str]
    """A function of ``training.schedules``."""
    iterations: Positive
    """Iterations until the rate is 0."""
    warmup: NotNegative
    """Iterations of linear rise."""


class OldPolicy(TypedDict, total=False):
    """Arguments of the decay of the old policy."""

    __pydantic_config__ = NODE  # type: ignore[misc]
    _target_: Required[str]
    """A function of ``training.schedules``."""
    decay_type: Finite
    """Number of a published schedule."""
