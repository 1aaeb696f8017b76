"""What selection is expected to gain, from the true merits of a pool and of the candidates that are selected from it.

Advantages are divided by the standard deviation of the kept rewards, so the signal of a gradient grows with the spread
of the kept merits around the mean of their prompt, and its noise does not. The ratio rho of this spread with selection
to that without is therefore what an iteration learns more where noise dominates. Where the signal dominates (few
parameters, many prompts) it learns as much as without. The gain in iterations lies between 1 and rho.

Shapes: P prompts, N pool, K kept.
"""

import math

import torch
from torch import Tensor

from solrl_lightning.rollout.select import select_contrastive, take

GAIN_EXPONENT = 0.8
"""The expected gain in iterations is rho ** GAIN_EXPONENT: 0 where the signal dominates, 1 where noise does. From two
seeds of the embedded model."""
GAIN_ERROR = 0.12
"""The standard error of the logarithm of an expected gain, against those measured in 17 other settings of the embedded
model (docs/measurements.md)."""


def kept_variance(proxy: Tensor, truth: Tensor, keep: int) -> Tensor:
    """Return float64 [P]: variance (divisor K) of the true merits of the candidates that ``proxy`` [P, N] selects."""
    return _kept(proxy, truth, keep).var(dim=1, correction=0)


def random_variance(truth: Tensor, keep: int) -> Tensor:
    """Return float64 [P]: expected variance (divisor K) of ``keep`` random candidates of ``truth`` [P, N].

    Without replacement the variance with divisor K - 1 is an unbiased estimate of the pool's with divisor N - 1,
    so the expectation is the latter times (1 - 1 / K); exact for every pool.
    """
    return truth.double().var(dim=1, correction=1) * (1 - 1 / keep)


def gap_of_prompts(proxy: Tensor, truth: Tensor, keep: int) -> Tensor:
    """Return float64 [P]: mean true merit of the best half minus the worst half that ``proxy`` selects."""
    merits = _kept(proxy, truth, keep)
    return merits[:, : keep // 2].mean(dim=1) - merits[:, keep // 2 :].mean(dim=1)


def equal_selected(proxy: Tensor, truth: Tensor, keep: int) -> float:
    """Return the share of prompts whose selected candidates all have one true merit, which gives no gradient."""
    merits = _kept(proxy, truth, keep)
    return (merits == merits[:, :1]).all(dim=1).double().mean().item()


def equal_random(truth: Tensor, keep: int) -> float:
    """Return the expected share of prompts where ``keep`` random candidates of ``truth`` [P, N] have one true merit.

    The sum over the values of a prompt, of which n candidates have one, of C(n, K) / C(N, K).
    """
    counts = [row.unique(return_counts=True)[1].tolist() for row in truth]  # of each prompt
    ways = sum(math.comb(n, keep) for of_prompt in counts for n in of_prompt)
    return ways / math.comb(truth.shape[1], keep) / len(truth)


def ratio_of_sums(parts: Tensor, wholes: Tensor) -> tuple[float, float]:
    """Return sum(parts) / sum(wholes) of [P] each, and its standard error over prompts by the jackknife.

    NaN for a sum of 0; the error also of a single prompt, and where one prompt has all of ``wholes``.
    """
    parts, wholes, prompts = parts.double(), wholes.double(), len(parts)
    without = (parts.sum() - parts) / _not_zero(wholes.sum() - wholes)
    error = ((prompts - 1) * (without - without.mean()).square().mean()).sqrt()
    return (parts.sum() / _not_zero(wholes.sum())).item(), error.item() if prompts > 1 else torch.nan


def _kept(proxy: Tensor, truth: Tensor, keep: int) -> Tensor:
    return take(truth.double(), select_contrastive(proxy, keep))


def _not_zero(wholes: Tensor) -> Tensor:
    """Return NaN in place of sums that are 0 up to rounding."""
    return torch.where(wholes > 1e-12 * wholes.max().clamp(min=1e-12), wholes, torch.nan)
