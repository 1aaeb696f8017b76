"""Selection against a slow reference, and the ties and NaNs that the published code mishandles."""

import random

import pytest
import torch

from solrl_lightning.rollout.select import rerank, select_contrastive, take

NAN, INF = float("nan"), float("inf")


def slow_select(row: list[float], keep: int) -> list[int]:
    """Return the selection by the definition, one candidate at a time."""
    left = [i for i, score in enumerate(row) if score == score and abs(score) != INF]
    best: list[int] = []
    while len(best) < keep // 2:
        best.append(min(left, key=lambda i: (-row[i], i)))
        left.remove(best[-1])
    worst: list[int] = []
    while len(best) + len(worst) < keep:
        worst.append(min(left, key=lambda i: (row[i], i)))
        left.remove(worst[-1])
    return best + worst


SCORES, RARE = [0.3, 0.9, 0.1, 0.5, 0.7, 0.2], [float(i in (3, 20, 40, 60, 95)) for i in range(96)]


@pytest.mark.parametrize(
    ("scores", "keep", "expected"),
    [
        (SCORES, 4, [1, 4, 2, 5]),  # best descending, then worst ascending
        (SCORES, 5, [1, 4, 2, 5, 0]),  # one more of the worst
        (SCORES, 1, [2]),
        ([0.0] * 96, 24, list(range(24))),
        (RARE, 24, [3, 20, 40, 60, 95, 0, 1, 2, *range(4, 20)]),  # successes are never among the worst
        ([0.0, -0.0, 0.0, -0.0], 4, [0, 1, 2, 3]),
        ([NAN, 1.0, INF, 2.0, -INF, 3.0, 4.0, NAN], 4, [6, 5, 1, 3]),
        ([NAN, 1.0, INF, 2.0, -INF, 3.0, 4.0, NAN], 3, [6, 1, 3]),
    ],
)
def test_selection_by_hand(scores: list[float], keep: int, expected: list[int]) -> None:
    chosen = select_contrastive(torch.tensor([scores]), keep)
    assert chosen.tolist() == [expected] and chosen.dtype == torch.int64


def test_too_few_finite_scores_error_names_row_and_counts() -> None:
    scores = torch.ones(4, 8)
    scores[2, :6] = NAN
    scores[3, 2:] = INF
    with pytest.raises(ValueError, match=r"keep=4 finite scores; row 2 has 2 of 8 \(so have 1 more rows\)"):
        select_contrastive(scores, 4)
    with pytest.raises(ValueError, match="row 2 has 2 of 8$"):
        select_contrastive(scores[:3], 4)


def test_invalid_shapes_raise() -> None:
    for keep in (0, -2, 9):
        with pytest.raises(ValueError, match=f"keep={keep}"):
            select_contrastive(torch.ones(2, 8), keep)
    with pytest.raises(ValueError, match=r"\[P, N\]"):
        select_contrastive(torch.ones(8), 2)
    assert select_contrastive(torch.empty(0, 8), 4).shape == (0, 4)


def test_selection_matches_slow_reference_with_ties_and_nans() -> None:
    generator = random.Random(0)
    for _ in range(300):
        n = generator.randint(1, 30)
        levels = generator.choice([1, 2, 4, 1000])
        rows = [[float(generator.randrange(levels)) for _ in range(n)] for _ in range(3)]
        holes = generator.randint(0, n - 1)
        for row in rows:
            for i in generator.sample(range(n), holes):
                row[i] = generator.choice([NAN, INF, -INF])
        keep = generator.randint(1, n - holes)
        chosen = select_contrastive(torch.tensor(rows), keep).tolist()
        assert chosen == [slow_select(row, keep) for row in rows]
        assert all(len(set(row)) == keep for row in chosen)


def test_take_gathers_any_trailing_shape() -> None:
    values = torch.arange(2 * 4 * 3).view(2, 4, 3)
    chosen = torch.tensor([[3, 0], [1, 1]])
    assert torch.equal(take(values, chosen), torch.stack([values[0, [3, 0]], values[1, [1, 1]]]))
    assert torch.equal(take(values[..., 0], chosen), take(values, chosen)[..., 0])


def test_rerank_permutes_scores_into_order_of_rewards() -> None:
    scores = torch.tensor([[5.0, 1.0, 4.0, 3.0, 2.0, 0.0]])
    places = torch.tensor([[0, 2, 5, 1]])  # the two best and the two worst
    actual = rerank(scores, places, torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    assert actual.tolist() == [[0.0, 4.0, 5.0, 3.0, 2.0, 1.0]]
    chosen = select_contrastive(actual, 2)
    assert chosen.tolist() == [[2, 0]]  # the best and the worst of the latest rewards


def test_rerank_keeps_equal_order_and_ranks_non_finite_rewards_in_the_middle() -> None:
    scores = torch.randn(3, 9, generator=torch.Generator().manual_seed(3))
    places = select_contrastive(scores, 5)
    assert torch.equal(rerank(scores, places, 10 * scores.gather(1, places)), scores)
    rewards = torch.tensor([[3.0, 2.0, torch.nan, 1.0, 0.0]]).expand(3, -1)
    actual = rerank(scores, places, rewards)
    selected_scores = scores.gather(1, places).sort(dim=1, descending=True).values
    assert torch.equal(actual.gather(1, places)[:, 2], selected_scores[:, 2])
