"""`trainer=fsdp`: ranks that hold a part of the frozen transformer each, for policies that do not fit one device.

FSDP2 (``fully_shard``) gathers the weights of a block where it runs. Adapters, their optimiser and averages are whole
on every rank and reduced by DDP, so checkpoints and LoRA files are those of DDP. Every forward pass is collective: all
ranks must make equally many.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from peft import LoraConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from solrl_lightning.errors import UserError
from solrl_lightning.facts import check_shares
from solrl_lightning.policies import adapters
from solrl_lightning.policies.adapters import OLD, State
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.rollout.stage import BatchSize
from solrl_lightning.training.samplers import MERGED, POLICY, REFERENCE, Samplers

T = TypeVar("T")


class ShardedBase(DDPStrategy):
    """DDP that shards the frozen parameters of the module's transformer over all ranks.

    Raises:
        UserError: in ``setup``, if ranks would have different numbers of prompts.
    """

    def setup(self, trainer: Trainer) -> None:
        module: Any = self.lightning_module
        counts = {
            "prompts_per_iteration": trainer.fit_loop.schedule.per_iteration,  # type: ignore[attr-defined]
            "data.eval_prompts": len(module.eval_prompts),
        }
        check_shares(counts, self.world_size)
        if not isinstance(module.transformer, FSDPModule):
            shard_base(module, init_device_mesh(self.root_device.type, (self.world_size,)))
        super().setup(trainer)


def shard_base(module: LightningModule, mesh: DeviceMesh) -> None:
    """Shard all parameters of ``module.transformer`` but the adapters', block by block and in place."""
    transformer: Any = module.transformer
    adapted = {parameter for name, parameter in transformer.named_parameters() if ".lora_" in name}
    blocks = [block for child in transformer.children() if isinstance(child, nn.ModuleList) for block in child]
    for part in (*blocks, transformer):
        fully_shard(part, mesh=mesh, ignored_params=adapted)


class FixedBatchSize(BatchSize):
    """A batch size that all ranks have."""

    def sample(self, chunk: Callable[[], T]) -> T:
        """Return ``chunk()``: the forward passes of a second call would gather weights that no other rank sends."""
        return chunk()

    def halve(self) -> None:
        raise UserError(
            f"model.rollout_batch={self.size} is invalid: a rank ran out of memory, and with trainer=fsdp it cannot "
            f"change its batches alone. Set model.rollout_batch={max(1, self.size // 2)}."
        )


class ShardedSamplers(Samplers):
    """The policy's transformer alone, which samples with its LoRA branches: merged replicas would be whole copies."""

    def __init__(self, policy: PipelineAdapter, lora: LoraConfig, seed: int, batch_size: int) -> None:
        self.policy, self.transformer = policy, policy.transformer.train()
        self.replicas, self.layer_table, self.precision_backend = {}, "", "no shadow"
        self.lora_layers = adapters.add_adapters(self.transformer, lora, seed)
        self.batch_sizes = {name: FixedBatchSize(batch_size, pad_to_size=False) for name in (POLICY, MERGED)}
        self._base_norm = adapters.base_norm(self.lora_layers)  # before the weights are sharded

    @contextmanager
    def use(self, name: str) -> Iterator[nn.Module]:
        """Yield the transformer with the old policy, or the base for "reference"; restores "default" as the adapter."""
        if name == REFERENCE:
            with self.merged_with(self.adapter_state("base")) as transformer:
                yield transformer
        else:
            with super().use(POLICY) as transformer:
                yield transformer

    @contextmanager
    def merged_with(self, state: State) -> Iterator[nn.Module]:
        """Yield the transformer with the adapter weights ``state``; restores those of the old policy."""
        old = {name: value.clone() for name, value in self.adapter_state(OLD).items()}
        try:
            adapters.load_state(self.lora_layers, OLD, state)
            with super().use(POLICY) as transformer:
                yield transformer
        finally:
            adapters.load_state(self.lora_layers, OLD, old)

    def sync(self) -> None:
        """Do nothing: there is no replica."""
