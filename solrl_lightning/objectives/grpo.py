"""The clipped policy gradient of GRPO on the transitions of a stochastic sampler.

The ratio of a transition is its probability under the trained policy over that under the policy that sampled it. The
log-probability is a mean over the elements of the latents, as published; therefore ratios are close to 1 and clip
ranges are small.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from solrl_lightning.errors import UserError
from solrl_lightning.names import OLD
from solrl_lightning.objectives.base import KLObjective, Loss, check_given
from solrl_lightning.options.rules import Positive
from solrl_lightning.rollout.records import TrainingBatch
from solrl_lightning.sampling import StochasticSolver
from solrl_lightning.sampling.sde import log_prob


@dataclass(frozen=True, kw_only=True)
class GRPO(KLObjective):
    """`grpo_loss` on recorded transitions; a subclass has the transition of its sampler.

    All steps but the last one are stochastic, recorded and trained on. With ``old_policy.decay_type=0`` the policy that
    samples is the trained one at the start of the iteration, as published.

    Args:
        clip_range: likelihood ratios are clipped to 1 +- this.
        advantage_clip: advantages are clipped to +- this.
    """

    guided_training: ClassVar[bool] = True

    clip_range: Positive
    advantage_clip: Positive

    @property
    def needs(self) -> Mapping[str, int]:
        return {name: every for name, every in super().needs.items() if name != OLD}

    @property
    def solver(self) -> StochasticSolver:  # type: ignore[override]
        return StochasticSolver(self.transition)

    def transitions(self, num_steps: int, iteration: int) -> range:
        if num_steps == 1:
            raise UserError(
                f"family.regenerate.steps=1 is invalid: objective={type(self).__name__} trains on the steps before the "
                "last one. Set model.full_steps=2, or objective=nft."
            )
        return range(num_steps - 1)

    @abstractmethod
    def transition(self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean [B, ...] and the standard deviation [B] of the next x."""

    def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
        assert batch.x_next is not None and batch.log_prob is not None, "the solver records its transitions"
        at = batch.sigma, batch.sigma_next
        mean, std = self.transition(batch.x_t, velocity, *at)
        reference = others.get("reference")
        terms = grpo_loss(
            log_prob(batch.x_next, mean, std),
            batch.log_prob,
            mean,
            None if reference is None else self.transition(batch.x_t, reference, *at)[0],
            std / (batch.sigma - batch.sigma_next).sqrt(),
            batch.advantage,
            clip_range=self.clip_range,
            kl_weight=self.kl_weight_beside(others),
            advantage_clip=self.advantage_clip,
        )
        loss = self.loss_of(terms._replace(ratio=terms.ratio.mean()), others)
        if batch.optimizer_step == 0:  # the policy is still the one that sampled
            loss.metrics["first_ratio_error"] = (terms.ratio - 1).abs().mean()
        return loss


class GRPOLoss(NamedTuple):
    """Terms of `grpo_loss`: `loss` and `rows` have gradients, the others are detached."""

    loss: Tensor  # scalar, rows.mean()
    rows: Tensor  # [B], policy + kl_weight * kl of each transition
    policy: Tensor  # scalar
    kl: Tensor  # scalar, mean (mean - reference_mean)^2 / (2 noise_std^2) before its weight; 0 without a reference
    ratio: Tensor  # [B], before the clip
    clipped: Tensor  # scalar, share of transitions whose ratio lies outside 1 +- clip_range


def grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    mean: Tensor,
    reference_mean: Tensor | None,
    noise_std: Tensor,
    advantage: Tensor,
    *,
    clip_range: float,
    kl_weight: float,
    advantage_clip: float,
) -> GRPOLoss:
    """Return the loss of transitions: log-probabilities and advantage [B], means [B, ...], noise_std [B] or scalar.

    ``noise_std`` is the noise scale s of the SDE, without the factor sqrt(-dt), as the published KL term has it. Only
    ``log_prob`` and ``mean`` receive gradients. ``reference_mean`` may be None if kl_weight is 0.

    Raises:
        ValueError: ``reference_mean`` is None and kl_weight is not 0.
    """
    check_given("reference mean", reference_mean, "kl_weight", kl_weight)
    ratio = (log_prob - old_log_prob.detach()).exp()
    a = advantage.to(ratio).clamp(-advantage_clip, advantage_clip)
    policy = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip_range, 1 + clip_range))

    kl = torch.zeros_like(policy)
    if reference_mean is not None:
        distance = (mean - reference_mean.detach()).square().mean(dim=tuple(range(1, mean.ndim)))
        kl = distance / (2 * noise_std.detach().square())
    rows = policy + kl_weight * kl
    return GRPOLoss(
        loss=rows.mean(),
        rows=rows,
        policy=policy.detach().mean(),
        kl=kl.detach().mean(),
        ratio=ratio.detach(),
        clipped=((ratio.detach() - 1).abs() > clip_range).float().mean(),
    )
