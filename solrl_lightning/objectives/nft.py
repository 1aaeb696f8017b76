"""The DiffusionNFT loss (Zheng et al. 2025, arXiv 2509.16117), as Sol-RL trains with it.

The policy's step away from the old policy is mirrored: samples of positive advantage pull the velocity to its own side,
samples of negative advantage push it to the mirrored side. No likelihoods, any ODE solver.

1. Sign convention: v = eps - x0, x_t = (1 - sigma) x0 + sigma eps, so x_t - sigma v predicts x0.
2. Left out: the published code's other advantage modes (positive or negative only, one only, binary), which no
   preset uses.
3. The factor `advantage_clip` multiplies the policy term, as published. The KL weight is therefore effectively
   kl_weight / advantage_clip, and the factor acts as a learning rate under clipping by gradient norm.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.objectives.base import KLObjective, Loss, kl_to, mean_square, means
from solrl_lightning.options.rules import Positive
from solrl_lightning.rollout.records import TrainingBatch

_MIN_ERROR = 1e-5  # floor of the adaptive weight, so that an exact x0 prediction does not divide by zero


@dataclass(frozen=True)
class NFT(KLObjective):
    """`nft_loss` on re-noised images.

    Args:
        beta: distance of v+ and v- from the old velocity; at 1, v+ is the policy.
        advantage_clip: bound of the advantages, and a factor of the policy term.
    """

    beta: Positive
    advantage_clip: Positive

    def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
        settings = {"beta": self.beta, "advantage_clip": self.advantage_clip}
        return self.loss_of_velocity(nft_loss, velocity, batch, others, **settings)


class NFTLoss(NamedTuple):
    """Terms of `nft_loss`: `loss` and `rows` have gradients, the others are detached batch means for logging."""

    loss: Tensor  # scalar, rows.mean()
    rows: Tensor  # [B], policy + kl_weight * kl of each sample
    policy: Tensor  # scalar, with its factor advantage_clip
    kl: Tensor  # scalar, mean (v - v_ref)^2 before its weight; 0 without a reference
    positive: Tensor  # scalar, L+
    negative: Tensor  # scalar, L-
    drift: Tensor  # scalar, mean (v - v_old)^2
    clipped: Tensor  # scalar, share of samples whose advantage lies outside +- advantage_clip


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    reference_velocity: Tensor | None,
    x0: Tensor,
    x_t: Tensor,
    sigma: Tensor,
    advantage: Tensor,
    *,
    beta: float,
    kl_weight: float,
    advantage_clip: float,
) -> NFTLoss:
    """Return the loss of velocities, x0 and x_t [B, ...]; sigma [B] or scalar; advantage [B].

    Only `velocity` receives gradients. `reference_velocity` may be None if kl_weight is 0.
    """
    v, v_old = velocity.float(), old_velocity.detach().float()
    level = sigma.float().expand(v.shape[0]).view(-1, *[1] * (v.ndim - 1))

    # The implicit policies: v+ = (1 - beta) v_old + beta v, v- = (1 + beta) v_old - beta v.
    positive = normalised_error(x_t.float() - level * ((1 - beta) * v_old + beta * v), x0.float())
    negative = normalised_error(x_t.float() - level * ((1 + beta) * v_old - beta * v), x0.float())

    # The optimality probability r in [0, 1]; 1/2 is an average sample.
    r = advantage.to(v.device, torch.float64).clamp(-advantage_clip, advantage_clip) / advantage_clip / 2 + 0.5
    policy = advantage_clip * (r * positive + (1 - r) * negative) / beta
    kl = kl_to(reference_velocity, v, kl_weight)
    rows = (policy + kl_weight * kl).float()
    return NFTLoss(
        rows.mean(),
        rows,
        **means(policy=policy, kl=kl, positive=positive, negative=negative, drift=mean_square(v.detach() - v_old)),
        clipped=(advantage.abs() > advantage_clip).float().mean(),
    )


def normalised_error(prediction: Tensor, x0: Tensor) -> Tensor:
    """Return float64 [B]: mean squared error over the detached mean absolute error of each sample."""
    error = prediction - x0
    dims = tuple(range(1, error.ndim))
    weight = error.detach().abs().mean(dim=dims, dtype=torch.float64).clamp(min=_MIN_ERROR)
    return error.square().mean(dim=dims, dtype=torch.float64) / weight
