"""`trainer=fsdp`: ranks that hold a part of the frozen transformer each, for policies that do not fit one device.

FSDP2 (``fully_shard``) gathers the weights of a block where it runs. Adapters, their optimiser and averages are whole
on every rank and reduced by DDP, so checkpoints and LoRA files are those of DDP. Every forward pass is collective: all
ranks must make equally many.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from peft import LoraConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from solrl_lightning.errors import UserError
from solrl_lightning.facts import check_shares
from solrl_lightning.names import MERGED, POLICY
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.rollout.chunks import BatchSize
from solrl_lightning.training.samplers import PolicySampler
from solrl_lightning.training.transformers import REFERENCE, AdaptedTransformer, Transformers, VelocityModel

T = TypeVar("T")


class ShardedBase(DDPStrategy):
    """DDP that shards the frozen parameters of the module's transformer over all ranks.

    Raises:
        UserError: in ``setup``, if ranks would have different numbers of prompts.
    """

    def setup(self, trainer: Trainer) -> None:
        module: Any = self.lightning_module
        schedule = trainer.fit_loop.schedule  # type: ignore[attr-defined]
        check_shares(schedule.per_iteration, schedule.uses, len(module.evaluation.prompts), self.world_size)
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


def shard_transformers(policy: PipelineAdapter, lora: LoraConfig, seed: int, batch_size: int) -> Transformers:
    """Return the transformers of a rank: the trained one alone, as merged replicas would be whole copies.

    Args:
        policy: architecture with loaded weights; its transformer gets the adapters.
        lora: rank, alpha and target modules of the adapters.
        seed: seed of the adapters' initial values.
        batch_size: candidates per forward pass.
    """
    trained = AdaptedTransformer(policy.transformer, lora, seed)
    sampler = PolicySampler(policy, trained.old, FixedBatchSize(batch_size, pad_to_size=False))
    velocity_models: dict[str, VelocityModel] = {
        "old": trained.old,
        REFERENCE: lambda: trained.old(trained.state("base")),
    }
    return Transformers(trained, {POLICY: sampler, MERGED: sampler}, velocity_models)
