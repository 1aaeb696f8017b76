"""Select the best and the worst candidates of a pool.

Differs from the published code: the two halves are disjoint (there, 96 equal ones select the same 12 twice), and a
non-finite merit is never selected (there, NaN counts as the best). The published code's other modes (random, mean
deviation, random extremes) are left out: no result of the paper uses them.

Shapes: P prompts, N pool, K kept.
"""

import torch
from torch import Tensor


def select_contrastive(scores: Tensor, keep: int) -> Tensor:
    """Return int64 [P, keep] indices into scores [P, N]: keep//2 best, best first, then the worst, worst first.

    ``scores`` are merits. The indices are distinct, so keep = N gives a permutation. Equal scores are ordered by index
    in both halves.

    Raises:
        ValueError: scores is not [P, N] with 1 <= keep <= N, or a row has fewer than ``keep`` finite scores.
    """
    if scores.ndim != 2 or not 1 <= keep <= scores.shape[1]:
        raise ValueError(f"scores must be [P, N] with 1 <= keep <= N; got {list(scores.shape)} and keep={keep}")
    finite = scores.isfinite()
    short = (finite.sum(dim=1) < keep).nonzero().flatten().tolist()
    if short:
        row = short[0]
        raise ValueError(
            f"each row needs at least keep={keep} finite scores; row {row} has {int(finite[row].sum())} of "
            f"{scores.shape[1]}" + (f" (so have {len(short) - 1} more rows)" if len(short) > 1 else "")
        )
    descending = torch.where(finite, scores, -torch.inf).argsort(dim=1, descending=True, stable=True)
    best = descending[:, : keep // 2]
    left = finite.scatter(1, best, False)
    ascending = torch.where(left, scores, torch.inf).argsort(dim=1, stable=True)
    return torch.cat([best, ascending[:, : keep - keep // 2]], dim=1)


def rerank(merits: Tensor, places: Tensor, later: Tensor) -> Tensor:
    """Return the merits [P, N] of a pool, handed out at ``places`` [P, K] in the order of a later rung's merits [P, K].

    The values stay, so one ranking of the pool has the decisions of all rungs. A later merit that is not finite counts
    as the median.
    """
    places = places.to(merits.device)
    finite = torch.where(later.isfinite(), later, torch.nan)
    later = torch.where(finite.isnan(), finite.nanmedian(dim=1, keepdim=True).values, finite)
    descending = merits.gather(1, places).sort(dim=1, descending=True, stable=True).values
    order = later.argsort(dim=1, descending=True, stable=True).to(merits.device)
    return merits.scatter(1, places.gather(1, order), descending)


def take(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the candidates ``chosen`` [P, K] of values [P, N, ...] as [P, K, ...]."""
    return values[torch.arange(values.shape[0], device=values.device)[:, None], chosen.to(values.device)]
