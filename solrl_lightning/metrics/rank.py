"""How well the cheap proxy reward ranks a pool that was also scored by the true (BF16) reward.

Correlations say how well the whole pool is ordered; the other four look only at what selection looks at, the top and
the bottom.

Shapes: P prompts, N pool.
"""

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.regression import kendall_rank_corrcoef, spearman_corrcoef

from solrl_lightning.rollout.select import select_contrastive

NAMES = ("spearman", "kendall", "top_overlap", "bottom_overlap", "top_mean_rank", "bottom_mean_rank")


class RankFidelity(Metric):
    """Means over prompts, of all updates and all ranks, of:

    spearman, kendall           rank correlations of proxy and truth; tau-b, which allows for ties
    top_overlap                 share of the proxy's k best that are among the true k best, k = keep // 2
    bottom_overlap              the same for the k worst
    top_mean_rank               mean true rank of the proxy's k best: 1 is the best candidate, (k + 1) / 2 is perfect
    bottom_mean_rank            mean true rank of the proxy's k worst: N is the worst candidate; tied ranks are averaged

    A prompt whose proxy or truth is constant, or not finite, has no ranks: it is left out of the means and counted as
    `skipped`. With no prompt left the means are NaN.
    """

    full_state_update = False
    totals: Tensor
    prompts: Tensor
    skipped: Tensor

    def __init__(self, keep: int) -> None:
        super().__init__()
        if keep < 2:
            raise ValueError(f"keep // 2 best and worst are compared, so keep must be at least 2; got {keep}")
        self.k = keep // 2
        self.add_state("totals", torch.zeros(len(NAMES), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("prompts", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("skipped", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, proxy: Tensor, truth: Tensor) -> None:
        """proxy [P, N] and truth [P, N] rewards of the same candidates."""
        if proxy.shape != truth.shape or proxy.ndim != 2 or proxy.shape[1] < 2 * self.k:
            raise ValueError(
                f"proxy and truth must both be [P, N] with N >= {2 * self.k}; "
                f"got {list(proxy.shape)} and {list(truth.shape)}"
            )
        ranked = _has_ranks(proxy) & _has_ranks(truth)
        self.skipped += (~ranked).sum().to(self.skipped.device)
        if ranked.any():
            values = rank_fidelity(proxy[ranked].float(), truth[ranked].float(), self.k)
            self.totals += values.sum(dim=0).to(self.totals.device)
            self.prompts += ranked.sum().to(self.prompts.device)

    def compute(self) -> dict[str, Tensor]:
        """A scalar per name of the class's docstring, and `skipped`."""
        means = (self.totals / self.prompts).float()
        return {**dict(zip(NAMES, means, strict=True)), "skipped": self.skipped.clone()}


def rank_fidelity(proxy: Tensor, truth: Tensor, k: int) -> Tensor:
    """float64 [P, 6]: the values of each prompt, in the order of NAMES, of float32 rewards [P, N]."""
    # torchmetrics' tau fails on [N, 1], so one prompt goes in as [N].
    columns = proxy.T.squeeze(1), truth.T.squeeze(1)
    tau = kendall_rank_corrcoef(*columns, variant="b")
    assert isinstance(tau, Tensor)  # a pair only with a significance test
    ranks = _ranks(truth)
    chosen, true = select_contrastive(proxy, 2 * k), select_contrastive(truth, 2 * k)
    return torch.stack(
        [
            spearman_corrcoef(*columns).reshape(-1).double(),
            tau.reshape(-1).double(),
            _overlap(chosen[:, :k], true[:, :k]),
            _overlap(chosen[:, k:], true[:, k:]),
            ranks.gather(1, chosen[:, :k]).mean(dim=1),
            ranks.gather(1, chosen[:, k:]).mean(dim=1),
        ],
        dim=1,
    )


def _has_ranks(values: Tensor) -> Tensor:
    """bool [P] of values [P, N]."""
    return values.isfinite().all(dim=1) & (values != values[:, :1]).any(dim=1)


def _ranks(values: Tensor) -> Tensor:
    """float64 [P, N] of values [P, N]: 1 for the largest; equal values share their mean rank."""
    values = values.contiguous()
    ascending = values.sort(dim=1).values
    smaller = torch.searchsorted(ascending, values)
    not_larger = torch.searchsorted(ascending, values, right=True)
    return values.shape[1] - (smaller + not_larger).double() / 2 + 0.5


def _overlap(chosen: Tensor, true: Tensor) -> Tensor:
    """float64 [P]: share of chosen [P, k] found in true [P, k]."""
    return (chosen[:, :, None] == true[:, None, :]).any(dim=2).double().mean(dim=1)
