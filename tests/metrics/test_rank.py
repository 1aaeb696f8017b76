"""Rank fidelity against SciPy, with ties, and its sums over updates and ranks."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from solrl_lightning.metrics.rank import NAMES, RankFidelity


def rewards(prompts: int, pool: int, levels: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(prompts, pool, generator=generator)
    proxy = truth + torch.randn(prompts, pool, generator=generator)
    if levels is None:
        return proxy, truth
    return (proxy * levels).round() / levels, (truth * levels).round() / levels


def updated(keep: int, *batches: tuple[Tensor, Tensor]) -> RankFidelity:
    metric = RankFidelity(keep)
    for proxy, truth in batches:
        metric.update(proxy, truth)
    return metric


def values(metric: RankFidelity) -> list[float]:
    return [float(metric.compute()[name]) for name in NAMES]


def from_scipy(proxy: Tensor, truth: Tensor, k: int) -> list[float]:
    """Return the six metrics of one prompt, by SciPy and NumPy."""
    p, t = proxy.double().numpy(), truth.double().numpy()
    top, true_top = (np.argsort(-x, kind="stable")[:k].tolist() for x in (p, t))
    # The worst are selected from the candidates that are not among the best.
    bottom = [i for i in np.argsort(p, kind="stable").tolist() if i not in top][:k]
    true_bottom = [i for i in np.argsort(t, kind="stable").tolist() if i not in true_top][:k]
    ranks = stats.rankdata(-t)
    return [
        stats.spearmanr(p, t).statistic,
        stats.kendalltau(p, t, variant="b").statistic,
        len(set(top) & set(true_top)) / k,
        len(set(bottom) & set(true_bottom)) / k,
        ranks[top].mean(),
        ranks[bottom].mean(),
    ]


@pytest.mark.parametrize("levels", [None, 4, 1])
@pytest.mark.parametrize(("prompts", "pool", "keep"), [(3, 96, 24), (1, 96, 24), (2, 24, 24), (2, 7, 5), (2, 600, 24)])
def test_metrics_match_scipy_with_and_without_ties(prompts: int, pool: int, keep: int, levels: int | None) -> None:
    proxy, truth = rewards(prompts, pool, levels)
    expected = np.mean([from_scipy(p, t, keep // 2) for p, t in zip(proxy, truth, strict=True)], axis=0)
    assert values(updated(keep, (proxy, truth))) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("sign", "expected"), [(1, [1, 1, 1, 1, 6.5, 90.5]), (-1, [-1, -1, 0, 0, 90.5, 6.5])])
def test_perfect_and_reversed_proxies(sign: int, expected: list[float]) -> None:
    truth = torch.randperm(96, generator=torch.Generator().manual_seed(0)).float()[None]
    assert values(updated(24, (sign * truth / 7 + 1, truth))) == pytest.approx(expected, rel=1e-6)


def test_prompts_without_ranks_are_skipped() -> None:
    proxy, truth = rewards(5, 24)
    expected = values(updated(8, (proxy[:1], truth[:1])))
    proxy[1] = 0.5
    truth[2] = 0.5
    proxy[3, 4] = math.nan
    truth[4, 4] = math.inf
    metric = updated(8, (proxy, truth))
    assert int(metric.prompts) == 1 and values(metric) == expected
    assert all(math.isnan(value) for value in values(updated(8, (proxy[1:], truth[1:]))))


def test_metric_averages_over_updates_and_ranks() -> None:
    proxy, truth = rewards(7, 24, 4)
    parts = updated(8, (proxy[:1], truth[:1]), (proxy[1:3], truth[1:3])), updated(8, (proxy[3:], truth[3:]))
    for state, reduction in parts[0]._reductions.items():  # as a sync over two ranks
        assert reduction is not None
        setattr(parts[0], state, reduction(torch.stack([getattr(part, state) for part in parts])))
    assert values(parts[0]) == pytest.approx(values(updated(8, (proxy, truth))), rel=1e-6)


def test_one_kept_candidate_has_no_worst() -> None:
    with pytest.raises(ValueError, match="at least 2; got 1"):
        RankFidelity(keep=1)
