"""What samples candidates: one interface, whichever transformer computes and wherever it runs.

A stage names its sampler, one of ``names.Sampler``; ``transformers`` and ``sharding`` make them.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from solrl_lightning.policies.lora import State
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.rollout.chunks import BatchSize, Chunk, iter_sampled_chunks
from solrl_lightning.rollout.records import EncodedPrompts
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.sampling import SolverState


class Sampler(Protocol):
    """Samples candidates with the trained weights of its last `sync`."""

    model: PipelineAdapter
    batch_size: BatchSize
    version: int | None
    """Version passed to the last `sync`; None before it, or if the weights are not the old policy's."""

    def sample(
        self,
        stage: Stage,
        prompts: EncodedPrompts,
        seeds: Tensor,
        initial_state: SolverState | None = None,
    ) -> Generator[Chunk, None, None]:
        """Yield the chunks of seeds [P, N] after ``stage``, as `iter_sampled_chunks`.

        Who stops before the last one closes the generator.
        """

    def sync(self, state: State, version: int | None) -> None:
        """Sample with the trained weights ``state`` from now on.

        ``version``: iterations after which the old policy had these weights; None if they are not the old policy's.
        """


class Explorers(Sampler, Protocol):
    """Sample and score elsewhere what the stages of exploration ask for."""

    precision: str
    """Of their shadow, as `Transformers.precision_backend`."""

    @property
    def costs(self) -> Mapping[str, int]:
        """`Reward.costs` of their scores so far, as <reward>_<kind>."""

    def metrics(self) -> dict[str, float]:
        """Return what is logged as ``explore/<name>`` after an iteration: a mean ``lag``, and counts to be added."""


class LocalSampler:
    """A transformer of this process: the trained one, in model.train=lora with its LoRA branches, or a replica.

    Args:
        model: whose transformer samples.
        old: context with the transformer of the old policy, or of the same with other trained weights; a replica has
            those that were written last.
        batch_size: candidates per forward pass.
        write: writes trained weights into a replica in place.
    """

    def __init__(
        self,
        model: PipelineAdapter,
        old: Callable[[State | None], AbstractContextManager[nn.Module]],
        batch_size: BatchSize,
        write: Callable[[State], None] = lambda state: None,
    ) -> None:
        self.model, self.batch_size = model, batch_size
        self.version: int | None = None
        self._old, self._write = old, write
        self._state: State | None = None

    def sample(
        self,
        stage: Stage,
        prompts: EncodedPrompts,
        seeds: Tensor,
        initial_state: SolverState | None = None,
    ) -> Generator[Chunk, None, None]:
        """Yield the sampled chunks of seeds [P, N]."""
        how = stage, prompts, seeds, initial_state
        with self._old(self._state) as transformer:
            yield from iter_sampled_chunks(self.model, transformer, self.batch_size, *how)

    def sync(self, state: State, version: int | None) -> None:
        """Sample with ``state``; the trained transformer has every version of the old policy already."""
        self._write(state)
        self._state, self.version = (state if version is None else None), version
