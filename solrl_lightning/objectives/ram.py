"""Reinforce Adjoint Matching (Bergmeister et al. 2026, arXiv 2605.10759): regression to a target that the reward moves.

The velocity is fitted to v_ref + r A (v* - v_old), with v* = eps - x0: the base model's velocity, moved along the
error of the policy that sampled. The base model has weight one in the target, so the strength r takes the place of a KL
weight, as its inverse.

1. The paper's loss (its Eq. 17) takes the error of the current velocity, behind a stop-gradient. Here, as in the
   published code, it is the error of the old policy, which sampled; both are the same while the two policies are equal.
2. The published code has r = 100, continuous noise levels of density proportional to sigma, eight for an image, and no
   clip of the gradient. Noise levels and the clip are the model's here, and A is the standardised advantage.
3. Advantages are not clipped, as published: |r A| above 1, which extrapolates beyond v*, is usual.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.objectives.base import Loss, Objective, mean_square, means
from solrl_lightning.options.rules import Positive, Share
from solrl_lightning.rollout.records import TrainingBatch


@dataclass(frozen=True)
class RAM(Objective):
    """`ram_loss` on re-noised images.

    Args:
        strength: r of the target v_ref + r A (v* - v_old); a larger one holds the policy less close to the base model.
        timestep_fraction: fraction of the noise levels that a sample is trained at.
    """

    strength: Positive
    timestep_fraction: Share

    @property
    def needs(self) -> Mapping[str, int]:
        return {"old": 1, "reference": 1}

    def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
        rows = batch.x0, batch.x_t, batch.sigma, batch.advantage
        terms = ram_loss(velocity, others["old"], others["reference"], *rows, strength=self.strength)
        return Loss(terms.rows, {"kl": terms.kl, "correction": terms.correction})


class RAMLoss(NamedTuple):
    """Terms of `ram_loss`: `loss` and `rows` have gradients, the others are detached batch means for logging."""

    loss: Tensor  # scalar, rows.mean()
    rows: Tensor  # [B], mean squared distance of each velocity from its target
    kl: Tensor  # scalar, mean (v - v_ref)^2
    correction: Tensor  # scalar, mean (r A (v* - v_old))^2, by which the targets differ from v_ref


def ram_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    reference_velocity: Tensor,
    x0: Tensor,
    x_t: Tensor,
    sigma: Tensor,
    advantage: Tensor,
    *,
    strength: float,
) -> RAMLoss:
    """Return the loss of velocities, x0 and x_t [B, ...]; sigma [B] or scalar, positive; advantage [B].

    Only `velocity` receives gradients.
    """
    v, v_ref = velocity.float(), reference_velocity.detach().float()
    each = v.shape[0], *[1] * (v.ndim - 1)
    level = sigma.double().expand(v.shape[0]).view(each)
    error = (x_t.double() - x0.double()) / level - old_velocity.detach().double()  # v* - v_old
    correction = strength * advantage.to(v.device, torch.float64).view(each) * error
    rows = mean_square(v - (v_ref + correction)).float()
    return RAMLoss(rows.mean(), rows, **means(kl=mean_square(v.detach() - v_ref), correction=mean_square(correction)))
