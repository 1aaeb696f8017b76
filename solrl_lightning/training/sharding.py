"""`trainer=fsdp`: ranks that hold a part of the transformer each, for policies that do not fit one device.

FSDP2 (``fully_shard``) gathers the weights of a block where it runs. With model.train=lora, adapters, their optimiser
and averages are whole on every rank and reduced by DDP; with full (``sharded_full``), no weights are whole, and FSDP2
reduces the gradients. Checkpoints and exported files are as with DDP. Every forward pass is collective: all ranks
must make equally many.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeVar

from diffusers import ModelMixin
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from solrl_lightning.artifacts.files import read_checkpoint
from solrl_lightning.errors import UserError
from solrl_lightning.names import MERGED, OLD, POLICY, REFERENCE
from solrl_lightning.options.trainer import check_shares
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.rollout.chunks import BatchSize
from solrl_lightning.training.samplers import LocalSampler
from solrl_lightning.training.sharded_full import ShardedFullTransformer, shard_blocks
from solrl_lightning.training.shards import gather, shard_like
from solrl_lightning.training.transformers import TrainedTransformer, Transformers, VelocityModel

T = TypeVar("T")


class ShardedBase(DDPStrategy):
    """DDP that shards the frozen parameters of the module's transformer over all ranks, or all that it trains."""

    def setup(self, trainer: Trainer) -> None:
        module: Any = self.lightning_module
        schedule = trainer.fit_loop.schedule  # type: ignore[attr-defined]
        check_shares(schedule.per_iteration, len(module.evaluation.prompts), self.world_size)
        trained = module.transformers.trained
        if not isinstance(trained.transformer, FSDPModule):
            mesh = init_device_mesh(self.root_device.type, (self.world_size,))
            if isinstance(trained, ShardedFullTransformer):
                trained.shard(mesh)
                names = [name for name, _ in chain(module.named_parameters(), module.named_buffers())]
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
            else:
                named = trained.transformer.named_parameters()
                adapters = {parameter for name, parameter in named if ".lora_" in name}
                shard_blocks(trained.transformer, mesh, ignored_params=adapters)
        super().setup(trainer)

    @property
    def is_full(self) -> bool:
        """Whether the trained weights are sharded, too."""
        module: Any = self.lightning_module
        return isinstance(module.transformers.trained, ShardedFullTransformer)

    def configure_ddp(self) -> None:
        """Wrap the module in DDP, which reduces the gradients of whole parameters."""
        if not self.is_full:
            super().configure_ddp()

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether the weights get their shards before their values."""
        return self.is_full

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Map the file into memory, so that a rank reads its parts of it."""
        return read_checkpoint(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's parts of the weights."""
        module: Any = self.lightning_module
        shards, weights = module.state_dict(), checkpoint["state_dict"]
        module.load_state_dict({name: shard_like(value, shards[name]) for name, value in weights.items()}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's parts of the moments."""
        states = [
            state | {"state": _shard_moments(optimizer, state["state"])}
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        ]
        super().load_optimizer_state_dict({"optimizer_states": states})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write whole tensors, from rank 0. Collective."""
        super().save_checkpoint(gather(checkpoint), filepath, storage_options)


def _shard_moments(optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the state of each parameter with this rank's part of the tensors that have its shape."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        index: {
            name: shard_like(value, parameters[index]) if value.shape == parameters[index].shape else value
            for name, value in tensors.items()
        }
        for index, tensors in state.items()
    }


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


def shard_transformers(
    model: PipelineAdapter, train: Callable[[ModelMixin], TrainedTransformer], batch_size: int
) -> Transformers:
    """Return the transformers of a rank: the trained one alone, as merged replicas would be whole copies.

    Arguments as in ``replicate``.
    """
    trained = train(model.transformer)
    trained.freeze(model.unused_layers)
    sampler = LocalSampler(model, trained.old, FixedBatchSize(batch_size, pad_to_size=False))
    velocity_models: dict[str, VelocityModel] = {
        OLD: trained.old,
        REFERENCE: lambda: trained.old(trained.state("base")),
    }
    return Transformers(trained, {POLICY: sampler, MERGED: sampler}, velocity_models)
