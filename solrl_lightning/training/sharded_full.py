"""model.train=full with trainer=fsdp: of all weights that `FullTransformer` has, each rank holds a part.

FSDP2 (``fully_shard``) gathers the weights of a block where it runs, rounded to their loaded dtype. It reduces the
gradients of each micro-batch in float32 and scatters them, so that a rank sums the gradients of its part alone.

| module | computes with |
|---|---|
| trained weights | their rounded copies, forward and backward |
| the loaded transformer | old policy, average or base, of which it gets a rounded copy where a context begins |
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from solrl_lightning.errors import UserError
from solrl_lightning.names import TRAINED
from solrl_lightning.policies.checkpointing import blocks_of
from solrl_lightning.policies.lora import State, norm_of_all
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.training.full import FullTransformer

_OVERRIDE = "param_dtype_override_fn"  # of MixedPrecisionPolicy


class ShardedFullTransformer(FullTransformer):
    """The policy's transformer, of which everything is trained and sharded. A state has DTensors.

    Before ``shard``, trained and old weights have shapes but no numbers. Forward passes, ``distances`` and
    ``shards.gather`` of a state are collective.
    """

    def __init__(self, transformer: ModelMixin) -> None:
        super().__init__(transformer, device="meta")
        parameters = {
            id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            for parameter in transformer.parameters()
        }
        buffers = {id(buffer): buffer for buffer in transformer.buffers()}
        self._whole = copy.deepcopy(transformer, parameters | buffers)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard all weights over the ranks of ``mesh``, block by block; the trained and the old ones are the base's.

        Raises:
            UserError: the loaded weights have several dtypes, and this version of torch does not gather them.
        """
        # Also the root, which would compute with the weights that it has gathered before they are written.
        shard_blocks(self.transformer, mesh, reshard_after_forward=True)
        self._base = {name: parameter.detach().clone() for name, parameter in self.transformer.named_parameters()}
        for weights in self.weights.values():
            loaded = {parameter: self._base[name].dtype for name, parameter in weights.named_parameters()}
            shard_blocks(weights, mesh, mp_policy=_rounding(loaded))
            values = {name: base.to(torch.float32, copy=True) for name, base in self._base.items()}
            weights.load_state_dict(values, strict=False, assign=True)

    @contextmanager
    def current(self) -> Iterator[nn.Module]:
        yield self.weights[TRAINED]

    @torch.no_grad()
    def _compute_with(self, state: State) -> None:
        for name, parameter in self.transformer.named_parameters():
            parameter.copy_(state[name])

    def _norm(self, tensors: Iterator[Tensor]) -> Tensor:
        square = norm_of_all(tensor.to_local() for tensor in tensors).square()  # type: ignore[attr-defined]
        distributed.all_reduce(square)
        return square.sqrt()

    def save(self, model: PipelineAdapter, folder: Path, state: State) -> None:
        transformer = copy.deepcopy(self._whole)
        rounded = {name: state[name].to(parameter.dtype) for name, parameter in transformer.named_parameters()}
        transformer.load_state_dict(rounded, strict=False, assign=True)
        model.save_transformer(folder, transformer)


def shard_blocks(transformer: Any, mesh: DeviceMesh, **options: Any) -> None:
    """Shard the parameters of a diffusers model, block by block and in place; ``options`` as of ``fully_shard``."""
    for part in (*blocks_of(transformer), transformer):
        fully_shard(part, mesh=mesh, **options)


def _rounding(loaded: Mapping[nn.Parameter, torch.dtype]) -> MixedPrecisionPolicy:
    """Return the policy by which float32 parameters compute in their ``loaded`` dtypes; gradients stay float32."""
    options: dict[str, Any] = dict(reduce_dtype=torch.float32, cast_forward_inputs=False)
    narrow = set(loaded.values()) - {torch.float32}
    if not narrow:
        return MixedPrecisionPolicy(**options)
    (dtype,) = narrow  # a model is loaded in one dtype, except for layers that diffusers keeps in float32
    if torch.float32 in loaded.values():
        if _OVERRIDE not in (field.name for field in fields(MixedPrecisionPolicy)):
            raise UserError(
                "trainer=fsdp is invalid: with model.train=full this model has layers in float32 among those in "
                f"{dtype}, and FSDP2 of torch {torch.__version__} gathers one dtype. Update torch, or set trainer=ddp."
            )
        options[_OVERRIDE] = lambda parameter: loaded[parameter] if loaded[parameter] == torch.float32 else None
    return MixedPrecisionPolicy(param_dtype=dtype, **options)
