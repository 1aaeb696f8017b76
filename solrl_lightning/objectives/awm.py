"""The Advantage Weighted Matching loss (arXiv 2509.25050): a clipped policy gradient on the flow-matching error.

The log-likelihood of a sample at (sigma, eps) is minus its (reweighted) velocity-matching error; ratio, advantage and
clip are as in PPO, one ratio per noise level.

1. The ratio is taken against `old_velocity`, the policy that sampled. The published code takes it against the current
   weights, which is the same while rollouts are by those weights; pass None for that.
2. `old_weight` is the published pull to a slowly moving copy of the policy (its weight 1); here that copy is the old
   policy.
3. Left out: the ratio of summed errors over all noise levels ("sum first"), and the Huber weighting without sigma.
4. The target eps - x0 is recovered as (x_t - x0) / sigma, so sigma = 0 is not a training level.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.objectives.base import KLObjective, Loss, check_given, kl_to, mean_square, means
from solrl_lightning.options.rules import NotNegative, Positive
from solrl_lightning.rollout.records import TrainingBatch

_HUBER_POWER = 0.25
_HUBER_OFFSET = 1e-10  # keeps the power's slope finite at zero error

Weighting = Callable[[Tensor, Tensor], Tensor]
"""Mean squared error [B] and sigma [B] -> weighted error [B]."""


@dataclass(frozen=True)
class AWM(KLObjective):
    """`awm_loss` on re-noised images, with the published weighting `ghuber`.

    Args:
        old_weight: weight of the mean squared distance to the old policy's velocity.
        advantage_clip: advantages are clipped to +- this and divided by it.
        ratio_clip: likelihood ratios are clipped to 1 +- this.
    """

    old_weight: NotNegative
    advantage_clip: Positive
    ratio_clip: Positive

    def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
        clips = {"advantage_clip": self.advantage_clip, "ratio_clip": self.ratio_clip}
        return self.loss_of_velocity(awm_loss, velocity, batch, others, old_weight=self.old_weight, **clips)


class AWMLoss(NamedTuple):
    """Terms of `awm_loss`: `loss` and `rows` have gradients, the others are detached batch means for logging."""

    loss: Tensor  # scalar, rows.mean()
    rows: Tensor  # [B], policy + kl_weight * kl + old_weight * drift of each sample
    policy: Tensor  # scalar
    kl: Tensor  # scalar, mean (v - v_ref)^2 before its weight; 0 without a reference
    drift: Tensor  # scalar, mean (v - v_old)^2 before its weight; 0 without an old policy
    ratio: Tensor  # scalar, mean likelihood ratio before the clip
    clipped: Tensor  # scalar, share of samples whose ratio lies outside 1 +- ratio_clip


def ghuber(error: Tensor, sigma: Tensor) -> Tensor:
    """Return the generalised Huber error ((m + c)^p - c^p) sigma / p [B] with p = 1/4, the published default."""
    power: Tensor = (error + _HUBER_OFFSET) ** _HUBER_POWER - _HUBER_OFFSET**_HUBER_POWER
    return power * sigma / _HUBER_POWER


def awm_loss(
    velocity: Tensor,
    old_velocity: Tensor | None,
    reference_velocity: Tensor | None,
    x0: Tensor,
    x_t: Tensor,
    sigma: Tensor,
    advantage: Tensor,
    *,
    kl_weight: float,
    old_weight: float,
    advantage_clip: float,
    ratio_clip: float,
    weighting: Weighting = ghuber,
) -> AWMLoss:
    """Return the loss of velocities, x0 and x_t [B, ...]; sigma [B] or scalar, positive; advantage [B].

    Only `velocity` receives gradients. A velocity whose weight is 0 may be None.

    Raises:
        ValueError: a velocity is None and its weight is not 0.
    """
    check_given("old policy's velocity", old_velocity, "old_weight", old_weight)
    v = velocity.float()
    level = sigma.double().expand(v.shape[0])
    target = (x_t.double() - x0.double()) / level.view(-1, *[1] * (v.ndim - 1))

    log_likelihood = -weighting(mean_square(v - target), level)
    sampled = v.detach() if old_velocity is None else old_velocity.detach().float()
    old_log_likelihood = -weighting(mean_square(sampled - target), level)
    ratio = (log_likelihood - old_log_likelihood).exp()
    a = advantage.to(v.device, torch.float64).clamp(-advantage_clip, advantage_clip) / advantage_clip
    policy = torch.maximum(-a * ratio, -a * ratio.clamp(1 - ratio_clip, 1 + ratio_clip))
    kl = kl_to(reference_velocity, v, kl_weight)
    drift = torch.zeros_like(policy) if old_velocity is None else mean_square(v - sampled)
    rows = (policy + kl_weight * kl + old_weight * drift).float()
    return AWMLoss(
        rows.mean(),
        rows,
        **means(policy=policy, kl=kl, drift=drift, ratio=ratio, clipped=((ratio - 1).abs() > ratio_clip).float()),
    )
