"""What samples candidates: one interface, whichever transformer computes and wherever it runs.

A stage names its sampler, one of ``names.Sampler``; ``transformers`` and ``sharding`` make them.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Protocol

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from solrl_lightning.policies import lora, replica
from solrl_lightning.policies.lora import State
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.quantization.low_rank import low_rank_branch
from solrl_lightning.rollout.chunks import BatchSize, Chunk, SamplingSpec, iter_sampled_chunks
from solrl_lightning.rollout.records import EncodedPrompts


class Sampler(Protocol):
    """Samples candidates with the adapter weights of its last `sync`."""

    policy: PipelineAdapter
    batch_size: BatchSize
    version: int | None
    """That of the last `sync`."""

    def sample(self, prompts: EncodedPrompts, seeds: Tensor, spec: SamplingSpec) -> Generator[Chunk, None, None]:
        """Yield the sampled chunks of seeds [P, N]; who stops before the last one closes the generator."""

    def sync(self, state: State, version: int | None) -> None:
        """Sample with the adapter weights ``state`` from now on.

        ``version``: iterations after which the old policy had these weights; None if they are not the old policy's.
        """


class PolicySampler:
    """The trained transformer with its LoRA branches.

    Args:
        policy: architecture.
        old: context with the transformer of the old policy, or of the same with other adapter weights.
        batch_size: candidates per forward pass.
    """

    def __init__(
        self,
        policy: PipelineAdapter,
        old: Callable[[State | None], AbstractContextManager[nn.Module]],
        batch_size: BatchSize,
    ) -> None:
        self.policy, self.batch_size = policy, batch_size
        self.version: int | None = 0
        self._old = old
        self._state: State | None = None

    def sample(self, prompts: EncodedPrompts, seeds: Tensor, spec: SamplingSpec) -> Generator[Chunk, None, None]:
        """Yield the sampled chunks of seeds [P, N]."""
        with self._old(self._state) as transformer:
            yield from iter_sampled_chunks(self.policy, transformer, self.batch_size, prompts, seeds, spec)

    def sync(self, state: State, version: int | None) -> None:
        """Sample with ``state``; the transformer's adapter "old" has every version of the old policy already."""
        self._state, self.version = (state if version is None else None), version


class ReplicaSampler:
    """A transformer without LoRA layers. Weights are merged in float32 and then rounded or quantised.

    Args:
        policy: architecture.
        transformer: the replica.
        lora_layers: adapted layers of the policy's transformer, with the base weights.
        batch_size: candidates per forward pass.
    """

    def __init__(
        self, policy: PipelineAdapter, transformer: nn.Module, lora_layers: dict[str, LoraLayer], batch_size: BatchSize
    ) -> None:
        self.policy, self.transformer, self.lora_layers, self.batch_size = policy, transformer, lora_layers, batch_size
        self.version: int | None = 0

    def sample(self, prompts: EncodedPrompts, seeds: Tensor, spec: SamplingSpec) -> Generator[Chunk, None, None]:
        """Yield the sampled chunks of seeds [P, N]."""
        yield from iter_sampled_chunks(self.policy, self.transformer, self.batch_size, prompts, seeds, spec)

    def sync(self, state: State, version: int | None) -> None:
        """Write ``state`` into the replica in place: into its low-rank branches, or merged with the base weights."""
        branches = {name: branch for name in self.lora_layers if (branch := low_rank_branch(self.transformer, name))}
        for name, branch in branches.items():
            branch.set_lora(*lora.factors(self.lora_layers[name], state, name))
        others = {name: layer for name, layer in self.lora_layers.items() if name not in branches}
        replica.refresh(self.transformer, lora.merged_weights(others, state))
        self.version = version
