"""Interface of the objectives.

To add one, write a subclass, and a YAML file in ``conf/objective`` (or in the folder given by ``--config-dir``) with
its class as ``_target_`` and its arguments as keys.

Shapes: B micro-batch, M kept samples, T solver steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from solrl_lightning.errors import UserError
from solrl_lightning.names import OLD, REFERENCE
from solrl_lightning.objectives.advantages import AllReduce, group_advantages
from solrl_lightning.options.rules import Count, NotNegative, Share
from solrl_lightning.rollout.records import TrainingBatch
from solrl_lightning.sampling import Solver
from solrl_lightning.seeds import train_timesteps, training_noise

NEEDS = (OLD, REFERENCE)  # velocities that an objective may read beside the trained policy's


class Loss(NamedTuple):
    """Loss of a micro-batch."""

    per_sample: Tensor  # [B] float32, with gradients
    metrics: dict[str, Tensor]  # means over the rows without gradients; each is logged as train/<name>


class Objective(ABC):
    """Loss of the trained policy's velocity on the kept samples. It is called without padding rows."""

    timestep_fraction: float = 1.0
    """Fraction of the T noise levels, or of the recorded transitions, that each kept sample is trained at."""
    solver: Solver | None = None
    """Solver of the samples that are trained on; None: the family's."""
    shared_noise: bool = False
    """Start the candidates of a prompt from one noise; only in families that do not explore."""
    guided_training: ClassVar[bool] = False
    """True if the loss is of the guided velocity, which samples. False if it is only valid without guidance."""

    @property
    def needs(self) -> Mapping[str, int]:
        """The other velocities that the loss reads: "old" (sampling policy), "reference" (base model).

        Name -> n: the velocity is computed in every n-th micro-batch.
        """
        return {OLD: 1}

    @property
    def forward_passes(self) -> float:
        """Forward passes per training row, on average."""
        return 1 + sum(1 / every for every in self.needs.values())

    def transitions(self, num_steps: int, iteration: int) -> range:
        """Return the steps of the sampler to train on (`x_t`, `x_next`), equally many in each iteration.

        The default is none: the rows are re-noised images.
        """
        return range(0)

    def train_steps(self, seeds: Tensor, num_steps: int) -> Tensor:
        """Return int64 [M, S]: which of the steps or transitions each sample of ``seeds`` [M] is trained at."""
        return train_timesteps(seeds, num_steps, self.timestep_fraction)

    def rows_per_sample(self, num_steps: int) -> int:
        """Return the number of training rows of a kept sample."""
        levels = len(self.transitions(num_steps, 0)) or num_steps
        return self.train_steps(torch.zeros(1, dtype=torch.int64), levels).shape[1]

    def advantages(self, merits: Tensor, all_reduce_sum: AllReduce = lambda total: total) -> Tensor:
        """Return float32 [P, K] of merits [P, K]."""
        return group_advantages(merits, all_reduce_sum=all_reduce_sum)

    def noisy(self, x0: Tensor, seeds: Tensor, steps: Tensor, sigmas: Tensor) -> Tensor:
        """Return x_t [B, ...] = (1 - sigma) x0 + sigma eps at ``sigmas[steps]``; eps is a function of (seed, step)."""
        sigma = sigmas[steps.to(sigmas.device)]
        eps = training_noise(seeds, steps, x0.shape[1:]).to(x0.device)
        return torch.lerp(x0, eps, sigma.view(-1, *[1] * (x0.ndim - 1)))

    @abstractmethod
    def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
        """Return the loss of ``velocity`` [B, ...] at ``batch.x_t``; ``others`` has the velocities named in `needs`."""


@dataclass(frozen=True, kw_only=True)
class KLObjective(Objective):
    """An objective of the sampling policy's velocity, with a KL term to the base model.

    Args:
        kl_weight: weight of the KL term, the mean squared distance to the base model's velocity, or in GRPO of the
            means of a step over twice the variance of its noise; 0 saves a forward pass.
        reference_every: n: compute the KL term in every n-th micro-batch, multiplied by n; n > 1 saves forward passes.
        timestep_fraction: fraction of the noise levels, or of the stochastic steps, that a sample is trained at.
    """

    kl_weight: NotNegative
    reference_every: Count = 1
    timestep_fraction: Share = 1.0

    @property
    def needs(self) -> Mapping[str, int]:
        return {OLD: 1} | ({REFERENCE: self.reference_every} if self.kl_weight else {})

    def loss_of_velocity(
        self,
        function: Callable[..., Any],
        velocity: Tensor,
        batch: TrainingBatch,
        others: Mapping[str, Tensor],
        **settings: float,
    ) -> Loss:
        """Return the Loss of ``function`` (`nft_loss`, `awm_loss`, `pepg_loss`) on re-noised images."""
        velocities = velocity, others[OLD], others.get(REFERENCE)
        rows = batch.x0, batch.x_t, batch.sigma, batch.advantage
        return self.loss_of(function(*velocities, *rows, kl_weight=self.kl_weight_beside(others), **settings), others)

    def kl_weight_beside(self, others: Mapping[str, Tensor]) -> float:
        """Return the weight of the KL term in a micro-batch, 0 without the reference; the mean is ``kl_weight``."""
        return self.kl_weight * self.reference_every if REFERENCE in others else 0.0

    def loss_of(self, terms: Any, others: Mapping[str, Tensor]) -> Loss:
        """Return ``terms``, the NamedTuple of a loss function, as a Loss with all its means as metrics."""
        left_out = {"loss", "rows"} | ({"kl"} if self.kl_weight and REFERENCE not in others else set())
        return Loss(terms.rows, {name: value for name, value in terms._asdict().items() if name not in left_out})


def mean_square(difference: Tensor) -> Tensor:
    """Return float64 [B] of [B, ...]."""
    return difference.square().mean(dim=tuple(range(1, difference.ndim)), dtype=torch.float64)


def kl_to(reference_velocity: Tensor | None, velocity: Tensor, kl_weight: float) -> Tensor:
    """Return the KL term before its weight, float64 [B]: the mean square of v - v_ref; 0 without a reference.

    Raises:
        ValueError: `reference_velocity` is None and kl_weight is not 0.
    """
    check_given("reference velocity", reference_velocity, "kl_weight", kl_weight)
    if reference_velocity is not None:
        return mean_square(velocity - reference_velocity.detach())
    return torch.zeros(velocity.shape[0], dtype=torch.float64, device=velocity.device)


def check_given(name: str, value: Tensor | None, key: str, weight: float) -> None:
    """Raise ValueError if ``value`` is None, although ``weight``, of the term that reads it, is not 0."""
    if value is None and weight != 0:
        raise ValueError(f"{key}={weight} needs the {name}; pass it or set {key}=0")


def means(**terms: Tensor) -> dict[str, Tensor]:
    """Return the mean of each term [B] as a float32 scalar without gradients, for logging."""
    return {name: term.detach().mean().float() for name, term in terms.items()}


def check_objective(objective: Objective, num_steps: int) -> None:
    """Raise UserError unless what ``objective`` declares fits a sampler of ``num_steps``."""
    needs, transitions = objective.needs, objective.transitions(num_steps, 0)
    if not isinstance(needs, Mapping) or any(
        name not in NEEDS or type(every) is not int or every < 1 for name, every in needs.items()
    ):
        names = ", ".join(NEEDS)
        rule = f"needs must map names among {names} to n, where every n-th micro-batch reads that velocity"
        raise _invalid(objective, rule, repr(needs))
    if not isinstance(transitions, range) or transitions != range(num_steps)[transitions.start : transitions.stop]:
        raise _invalid(objective, f"transitions must be consecutive steps of range(0, {num_steps})", transitions)
    levels = len(transitions) or num_steps
    steps = objective.train_steps(torch.zeros(1, dtype=torch.int64), levels)
    if steps.dtype != torch.int64 or steps.ndim != 2 or not set(steps.flatten().tolist()) <= set(range(levels)):
        rule = f"train_steps must return int64 [M, S] of numbers from 0 to {levels - 1}"
        raise _invalid(objective, rule, f"{steps.dtype} {steps.tolist()}")


def check_loss(objective: Objective, loss: Any, rows: int) -> Loss:
    """Return ``loss``, the result of ``objective`` for a micro-batch of so many rows.

    Raises:
        UserError: it is no `Loss`, has no value with a gradient per row, or a metric with the name of another.
    """
    losses = getattr(loss, "per_sample", loss)
    has_values = isinstance(losses, Tensor) and losses.shape == (rows,) and losses.requires_grad
    if not isinstance(loss, Loss) or not has_values:
        rule = f"it must return a Loss with per_sample [{rows}] with gradients for a micro-batch of {rows} rows"
        got = type(losses).__name__
        if isinstance(losses, Tensor):
            got += f" {list(losses.shape)} {'with' if losses.requires_grad else 'without'} gradients"
        raise _invalid(objective, rule, got)
    if taken := loss.metrics.keys() & {"loss", "grad_norm"}:
        raise _invalid(objective, "its metrics must have other names than loss and grad_norm", ", ".join(taken))
    return loss


def _invalid(objective: Objective, rule: str, value: Any) -> UserError:
    return UserError(f"objective={type(objective).__name__} is invalid: {rule}; got {value}. See docs/extending.md.")
