"""Interface of the objectives.

To add one, write a subclass, and a YAML file in ``conf/objective`` (or in the folder given by ``--config-dir``) with
its class as ``_target_`` and its arguments as keys.

Shapes: B micro-batch, M kept samples, T solver steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from solrl_lightning.errors import UserError
from solrl_lightning.rollout.records import TrainingBatch
from solrl_lightning.seeds import train_timesteps, training_noise


class Loss(NamedTuple):
    """Loss of a micro-batch."""

    per_sample: Tensor  # [B] float32, with gradients
    metrics: dict[str, Tensor]  # scalars without gradients; each is logged as train/<name>


class Objective(ABC):
    """Loss of the trained policy's velocity on the kept samples."""

    timestep_fraction: float = 1.0
    """Fraction of the T noise levels that each kept sample is trained at."""
    reference_every: int = 1
    """The reference velocity is computed in every n-th micro-batch only."""
    guided_training: ClassVar[bool] = False
    """True if the loss is of the guided velocity, which samples. False if it is only valid without guidance."""

    @property
    def needs(self) -> Sequence[str]:
        """Names of the other velocities that the loss reads: "old" (sampling policy), "reference" (base model)."""
        return ("old",)

    @property
    def forward_passes(self) -> float:
        """Forward passes per training row, on average."""
        return 1 + sum(1 / self.reference_every if name == "reference" else 1 for name in self.needs)

    @property
    def reads_path(self) -> bool:
        """True if rows are transitions of the sampler (`x_t`, `x_next`) instead of re-noised images."""
        return False

    def train_steps(self, seeds: Tensor, num_steps: int) -> Tensor:
        """Return int64 [M, S]: the solver steps that each sample of ``seeds`` [M] is trained at."""
        return train_timesteps(seeds, num_steps, self.timestep_fraction)

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
    """An objective of the sampling policy's velocity, with a KL term to the base model."""

    kl_weight: float
    reference_every: int = 1
    timestep_fraction: float = 1.0

    @property
    def needs(self) -> Sequence[str]:
        return ("old", "reference") if self.kl_weight else ("old",)

    def kl_weight_beside(self, others: Mapping[str, Tensor]) -> float:
        """Return the weight of the KL term in a micro-batch, 0 without the reference; the mean is ``kl_weight``."""
        return self.kl_weight * self.reference_every if "reference" in others else 0.0

    def loss_of(self, terms: Any, others: Mapping[str, Tensor]) -> Loss:
        """Return ``terms``, the NamedTuple of a loss function, as a Loss with all its means as metrics."""
        left_out = {"loss", "rows"} | ({"kl"} if self.kl_weight and "reference" not in others else set())
        return Loss(terms.rows, {name: value for name, value in terms._asdict().items() if name not in left_out})


def check_loss(objective: Objective, loss: Any, rows: int) -> Loss:
    """Return ``loss``, the result of ``objective`` for a micro-batch of so many rows.

    Raises:
        UserError: it is no `Loss`, or has no value per row.
    """
    if not isinstance(loss, Loss) or loss.per_sample.shape != (rows,):
        found = list(loss.per_sample.shape) if isinstance(loss, Loss) else type(loss).__name__
        raise UserError(
            f"objective={type(objective).__name__} is invalid: it must return a Loss with per_sample [{rows}] for "
            f"a micro-batch of {rows} rows; got {found}. See docs/extending.md."
        )
    return loss
