"""Proximal ELBO policy gradient (PEPG; arXiv 2602.04663): REINFORCE on an estimate of the likelihood.

The log-likelihood l of a sample at (sigma, eps) is minus the squared error of the predicted x0 over its detached mean
absolute error, the estimator "adaptive" of the published code and the error of DiffusionNFT. With D = l - l_old, the
log-ratio to the policy that sampled, each row is -exp(D) (A - D) l, where D has no gradient. The proximal term -D ends
the pull when the log-ratio has reached the advantage. It acts only where the old policy differs from the trained
one: with several optimiser steps in an iteration, or with an `old_policy` that lags behind.

1. Its variant PAR, exp(D) (A - (l - l_old))^2 / 2 with a detached exp(D), has the same gradient, so it is no option.
2. The published runs take A = 0.1 (reward - mean of its prompt). Here A is ``advantage_scale`` times the standardised
   advantage, so that it does not depend on the unit of the reward.
3. Left out: the other estimators of l, the variants without exp(D), and the KL terms of likelihoods; the KL term here
   is the published "girsanov".
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.objectives.base import KLObjective, Loss, kl_to, mean_square, means
from solrl_lightning.objectives.nft import normalised_error
from solrl_lightning.options.rules import Positive
from solrl_lightning.rollout.records import TrainingBatch


@dataclass(frozen=True)
class PEPG(KLObjective):
    """`pepg_loss` on re-noised images.

    Args:
        advantage_scale: factor of the advantages; the log-ratio at which the pull of a sample of advantage 1 ends.
    """

    advantage_scale: Positive

    def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
        return self.loss_of_velocity(pepg_loss, velocity, batch, others, advantage_scale=self.advantage_scale)


class PEPGLoss(NamedTuple):
    """Terms of `pepg_loss`: `loss` and `rows` have gradients, the others are detached batch means for logging."""

    loss: Tensor  # scalar, rows.mean()
    rows: Tensor  # [B], policy + kl_weight * kl of each sample
    policy: Tensor  # scalar
    kl: Tensor  # scalar, mean (v - v_ref)^2 before its weight; 0 without a reference
    drift: Tensor  # scalar, mean (v - v_old)^2
    likelihood: Tensor  # scalar, mean l
    log_ratio: Tensor  # scalar, mean |D|; compare it with the mean |A|


def pepg_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    reference_velocity: Tensor | None,
    x0: Tensor,
    x_t: Tensor,
    sigma: Tensor,
    advantage: Tensor,
    *,
    kl_weight: float,
    advantage_scale: float,
) -> PEPGLoss:
    """Return the loss of velocities, x0 and x_t [B, ...]; sigma [B] or scalar; advantage [B].

    Only `velocity` receives gradients. `reference_velocity` may be None if kl_weight is 0.
    """
    v, v_old = velocity.float(), old_velocity.detach().float()
    level = sigma.float().expand(v.shape[0]).view(-1, *[1] * (v.ndim - 1))

    likelihood = -normalised_error(x_t.float() - level * v, x0.float())
    log_ratio = likelihood.detach() + normalised_error(x_t.float() - level * v_old, x0.float())
    a = advantage_scale * advantage.to(v.device, torch.float64)
    policy = -log_ratio.exp() * (a - log_ratio) * likelihood
    kl = kl_to(reference_velocity, v, kl_weight)
    rows = (policy + kl_weight * kl).float()
    return PEPGLoss(
        rows.mean(),
        rows,
        **means(policy=policy, kl=kl, drift=mean_square(v.detach() - v_old)),
        **means(likelihood=likelihood, log_ratio=log_ratio.abs()),
    )
