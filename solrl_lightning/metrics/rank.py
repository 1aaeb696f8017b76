"""Agreement of the proxy reward's ranking of a pool with the true (BF16) reward's.

The correlations measure the order of the whole pool; the other four metrics measure the selected top and bottom.

Shapes: P prompts, N pool.
"""

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.regression import kendall_rank_corrcoef, spearman_corrcoef

from solrl_lightning.rollout.select import select_contrastive

NAMES = ("spearman", "kendall", "top_overlap", "bottom_overlap", "top_mean_rank", "bottom_mean_rank")


class RankFidelity(Metric):
    """Mean over the prompts of all updates and ranks of:

    spearman, kendall           rank correlations of proxy and truth; tau-b, which corrects for ties
    top_overlap                 share of the proxy's k best that are among the true k best, k = keep // 2
    bottom_overlap              the same for the k worst
    top_mean_rank               mean true rank of the proxy's k best: 1 is the best candidate, (k + 1) / 2 is perfect
    bottom_mean_rank            mean true rank of the proxy's k worst: N is the worst candidate; tied ranks are averaged

    A prompt whose proxy or truth is constant or not finite is excluded; with no prompt left the means are NaN.
    """

    full_state_update = False
    totals: Tensor
    prompts: Tensor

    def __init__(self, keep: int) -> None:
        super().__init__()
        if keep < 2:
            raise ValueError(f"keep // 2 best and worst are compared, so keep must be at least 2; got {keep}")
        self.k = keep // 2
        self.add_state("totals", torch.zeros(len(NAMES), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("prompts", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, proxy: Tensor, truth: Tensor) -> None:
        """Add the rewards proxy [P, N] and truth [P, N] of the same candidates, N >= 2 * (keep // 2)."""
        ranked = _has_ranks(proxy) & _has_ranks(truth)
        if ranked.any():
            values = rank_fidelity(proxy[ranked].float(), truth[ranked].float(), self.k)
            self.totals += values.sum(dim=0).to(self.totals.device)
            self.prompts += ranked.sum().to(self.prompts.device)

    def compute(self) -> dict[str, Tensor]:
        """Return one scalar per metric of the class docstring."""
        return dict(zip(NAMES, (self.totals / self.prompts).float(), strict=True))


def rank_fidelity(proxy: Tensor, truth: Tensor, k: int) -> Tensor:
    """Return float64 [P, 6]: the metrics of each prompt in the order of NAMES, from float32 rewards [P, N]."""
    # torchmetrics' kendall_rank_corrcoef fails on [N, 1] and accepts [N].
    columns = proxy.T.squeeze(1), truth.T.squeeze(1)
    tau = kendall_rank_corrcoef(*columns, variant="b")
    assert isinstance(tau, Tensor)  # torchmetrics returns a pair only for t_test=True
    ranks = _ranks(truth)
    selected, true = select_contrastive(proxy, 2 * k), select_contrastive(truth, 2 * k)
    return torch.stack(
        [
            spearman_corrcoef(*columns).reshape(-1).double(),
            tau.reshape(-1).double(),
            _overlap(selected[:, :k], true[:, :k]),
            _overlap(selected[:, k:], true[:, k:]),
            ranks.gather(1, selected[:, :k]).mean(dim=1),
            ranks.gather(1, selected[:, k:]).mean(dim=1),
        ],
        dim=1,
    )


def _has_ranks(values: Tensor) -> Tensor:
    """Return bool [P]: whether each row of values [P, N] is finite and not constant."""
    return values.isfinite().all(dim=1) & (values != values[:, :1]).any(dim=1)


def _ranks(values: Tensor) -> Tensor:
    """Return ranks float64 [P, N] of values [P, N]: 1 for the largest; equal values share their mean rank."""
    values = values.contiguous()
    ascending = values.sort(dim=1).values
    smaller = torch.searchsorted(ascending, values)
    not_larger = torch.searchsorted(ascending, values, right=True)
    return values.shape[1] - (smaller + not_larger).double() / 2 + 0.5


def _overlap(selected: Tensor, true: Tensor) -> Tensor:
    """Return float64 [P]: the share of chosen [P, k] found in true [P, k]."""
    return (selected[:, :, None] == true[:, None, :]).any(dim=2).double().mean(dim=1)
