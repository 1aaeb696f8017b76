"""The two dataloaders. Neither is a ``DataLoader``: Lightning would shard that again and start workers for it."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class RolloutLoader(Generic[T]):
    """Train batches, a fixed number, that the loop refills every iteration: a rank trains on what it rolled out."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._batches: Sequence[T] = ()

    def fill(self, batches: Sequence[T]) -> None:
        assert len(batches) == self._length, "ranks that disagree on the length deadlock in the gradient all-reduce"
        self._batches = batches

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        # A generator on purpose: Lightning calls iter() before the first fill and next() after it.
        yield from self._batches


class RankPrompts:
    """Evaluation prompts: one batch with this rank's share, so that every prompt is scored once over all ranks."""

    def __init__(self, prompts: Sequence[str], rank: int, ranks: int) -> None:
        self._share = list(prompts[rank::ranks])

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[str]]:
        yield self._share
