"""The expected gain of selection, against closed forms and simulations."""

from math import comb, sqrt

import pytest
import torch
from torch import Tensor

from solrl_lightning.metrics.selection_gain import (
    equal_random,
    equal_selected,
    gap_of_prompts,
    kept_variance,
    random_variance,
    ratio_of_sums,
)


def normal(prompts: int, pool: int) -> Tensor:
    return torch.randn(prompts, pool, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def spread(proxy: Tensor, truth: Tensor, keep: int) -> float:
    return sqrt(ratio_of_sums(kept_variance(proxy, truth, keep), random_variance(truth, keep))[0])


def test_spread_of_normal_rewards() -> None:
    truth = normal(2000, 96)
    # Of the normal distribution beyond z, where P(x > z) = 1/8: E[x^2] = 1 + z phi(z) / P = 2.895, and E[x] = 1.647.
    assert spread(truth, truth, 24) == pytest.approx(sqrt(2.895 / (1 - 1 / 24)), rel=0.02)
    assert spread(normal(2000, 97)[:, 1:], truth, 24) == pytest.approx(1, rel=0.02)  # a proxy that knows nothing
    assert spread(truth, truth, 96) == pytest.approx(1)  # all are kept
    assert gap_of_prompts(truth, truth, 24).mean().item() == pytest.approx(2 * 1.647, rel=0.02)
    assert (equal_random(truth, 24), equal_selected(truth, truth, 24)) == (0, 0)


def test_variance_of_random_candidates_is_that_of_all_their_groups() -> None:
    truth = torch.tensor([[0.0, 1.0, 4.0, 9.0, 10.0]])
    groups = truth[0].double()[torch.combinations(torch.arange(5), 3)]
    assert random_variance(truth, 3).item() == pytest.approx(groups.var(dim=1, correction=0).mean().item())


def test_constant_rewards_have_no_spread_and_no_signal() -> None:
    truth = torch.full((3, 8), 0.1)
    ratio, error = ratio_of_sums(kept_variance(truth, truth, 4), random_variance(truth, 4))
    assert ratio != ratio and error != error  # NaN
    assert (equal_random(truth, 4), equal_selected(truth, truth, 4)) == (pytest.approx(1), 1)


def test_strict_rewards_with_few_successes() -> None:
    """Of 96 candidates 5 succeed: selection keeps all of them among 24, random groups are often without any."""
    truth = torch.zeros(4, 96)
    truth[:, 40:45] = 1
    variance = 5 / 24 * 19 / 24
    assert kept_variance(truth, truth, 24).tolist() == pytest.approx([variance] * 4)
    expected = 5 / 96 * 91 / 96 * 96 / 95 * 23 / 24
    assert spread(truth, truth, 24) == pytest.approx(sqrt(variance / expected))
    assert equal_random(truth, 24) == pytest.approx(comb(91, 24) / comb(96, 24))
    assert equal_selected(truth, truth, 24) == 0
    assert equal_selected(-truth, torch.cat([truth[:2], torch.ones(2, 96)]), 24) == 0.5


def test_error_over_prompts_is_that_of_a_ratio() -> None:
    wholes = torch.ones(50)
    parts = normal(1, 50)[0]
    ratio, error = ratio_of_sums(parts, wholes)  # a mean, whose jackknife is std / sqrt(P)
    assert (ratio, error) == pytest.approx((parts.mean().item(), parts.std().item() / sqrt(50)))
    single, unknown = ratio_of_sums(parts[:1], wholes[:1])
    assert single == pytest.approx(parts[0].item()) and unknown != unknown
    ratio, unknown = ratio_of_sums(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))  # one prompt has all
    assert ratio == 0.5 and unknown != unknown
