"""The dataloaders of a run. Neither is a ``DataLoader``: Lightning would shard it again and start workers for it."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from solrl_lightning.data.prompt import Prompt

T = TypeVar("T")


class RolloutLoader(Generic[T]):
    """A fixed number of training batches, which the loop replaces in every iteration by the rank's own rollouts."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._batches: Sequence[T] = ()

    def fill(self, batches: Sequence[T]) -> None:
        """Replace the batches."""
        assert len(batches) == self._length, "ranks that disagree on the length deadlock in the gradient all-reduce"
        self._batches = batches

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        # This must be a generator: Lightning calls iter() before the first fill and next() after it.
        for number in range(len(self._batches)):  # iter() of a Sequence ends at any IndexError within
            yield self._batches[number]


class RankPrompts:
    """Evaluation prompts of one rank in one batch: prompt i belongs to rank i modulo ``ranks``."""

    def __init__(self, prompts: Sequence[Prompt], rank: int, ranks: int) -> None:
        self._prompts = list(prompts[rank::ranks])

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[Prompt]]:
        yield self._prompts
