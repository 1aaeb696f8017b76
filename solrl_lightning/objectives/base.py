"""The interface of an objective: what it reads, which noise levels it trains at, and its loss.

To add one, write a subclass in a file of its own and a YAML file in ``conf/objective`` (or in the folder of
``--config-dir``) with its class as ``_target_`` and its arguments as keys.

Shapes: B micro-batch, M kept samples, T solver steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solrl_lightning.rollout.records import TrainingBatch
from solrl_lightning.seeds import train_timesteps, training_noise


class Loss(NamedTuple):
    """The loss of a micro-batch."""

    per_sample: Tensor  # [B] float32, with gradients
    metrics: dict[str, Tensor]  # scalars without gradients; each is logged as train/<name>


class Objective(ABC):
    """A loss of the trained policy's velocity on the kept samples."""

    timestep_fraction: float = 1.0
    """Share of the T noise levels that a kept sample is trained at."""

    @property
    def needs(self) -> Sequence[str]:
        """The other velocities that the loss reads: of "old" (which sampled) and of "reference" (the base model)."""
        return ("old",)

    @property
    def reads_path(self) -> bool:
        """Whether rows are transitions of the sampler (`x_t`, `x_next`) instead of re-noised images."""
        return False

    def train_steps(self, seeds: Tensor, num_steps: int) -> Tensor:
        """Return int64 [M, S]: the solver steps that each of the samples ``seeds`` [M] is trained at."""
        return train_timesteps(seeds, num_steps, self.timestep_fraction)

    def noisy(self, x0: Tensor, seeds: Tensor, steps: Tensor, sigmas: Tensor) -> Tensor:
        """Return x_t [B, ...] = (1 - sigma) x0 + sigma eps at ``sigmas[steps]``; eps is a function of (seed, step)."""
        sigma = sigmas[steps.to(sigmas.device)]
        eps = training_noise(seeds, steps, x0.shape[1:]).to(x0.device)
        return torch.lerp(x0, eps, sigma.view(-1, *[1] * (x0.ndim - 1)))

    @abstractmethod
    def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
        """Return the loss of ``velocity`` [B, ...] at ``batch.x_t``; ``others`` has a velocity per name of `needs`."""


def loss_of(terms: Any) -> Loss:
    """Return the rows and every further term of a loss function's result, but for its scalar ``loss``."""
    return Loss(terms.rows, {name: value for name, value in terms._asdict().items() if name not in ("loss", "rows")})
