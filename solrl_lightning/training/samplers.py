"""Transformers that sample: the policy with its LoRA adapters, and replicas that share its frozen weights.

| name | weights | transformer |
|---|---|---|
| policy | old policy, LoRA branches | the trained one with adapter "old" active |
| merged | old policy, LoRA merged in float32 (TF32 on a GPU) and rounded to BF16 | replica |
| shadow | old policy, merged and quantised | replica, if a stage samples from it |
| reference | base model without adapters | replica |

Replicas are not submodules of the LightningModule, so checkpoints, optimisers and DDP do not see them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from solrl_lightning.policies import adapters, replica
from solrl_lightning.policies.adapters import OLD, TRAINED, State
from solrl_lightning.policies.compilation import compile_blocks
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.quantization import Backend, QuantizationRule, convert, format_table
from solrl_lightning.quantization import plan as plan_quantization
from solrl_lightning.rollout.records import EncodedPrompts
from solrl_lightning.rollout.stage import BatchSize, Chunk, SamplingSpec, iter_sampled_chunks

log = logging.getLogger(__name__)

POLICY, MERGED, SHADOW, REFERENCE = "policy", "merged", "shadow", "reference"


class Samplers:
    """Transformers that sample, with the batch size of each.

    Args:
        policy: architecture with loaded weights; its transformer gets the adapters.
        lora: rank, alpha and target modules of the adapters.
        seed: seed of the adapters' initial values.
        batch_size: candidates per forward pass.
        compile_replicas, compile_policy: compile the blocks of the replicas, and those of the trained transformer.
        compiler: backend of torch.compile.
        with_shadow: make the quantised replica.
        backend, rule: arithmetic of the shadow, and the layers to quantise.
    """

    def __init__(
        self,
        policy: PipelineAdapter,
        lora: LoraConfig,
        seed: int,
        batch_size: int,
        compile_replicas: bool,
        compile_policy: bool,
        with_shadow: bool,
        backend: Backend,
        rule: QuantizationRule,
        compiler: str | Callable[..., Any] = "inductor",
    ) -> None:
        self.policy, self.backend = policy, backend
        self.transformer = policy.transformer.train()  # none of these models has dropout
        self.reference = replica.clone_sharing_weights(self.transformer).eval()
        names = [MERGED, SHADOW] if with_shadow else [MERGED]
        self.replicas = {name: replica.clone_sharing_weights(self.transformer).eval() for name in names}
        """Replicas of the old policy by name."""
        self.layer_table = ""
        """Table of the shadow's linear layers."""
        self.precision_backend = f"{backend.precision} ({backend.name})" if with_shadow else "no shadow"
        if with_shadow:
            plans = plan_quantization(self.replicas[SHADOW], rule, backend)
            log.info("%s", backend.description)
            self.layer_table = format_table(plans)
            convert(self.replicas[SHADOW], plans, backend)
        self.lora_layers: dict[str, LoraLayer] = adapters.add_adapters(self.transformer, lora, seed)
        for module in self.replicas.values():
            replica.untie_weights(module, self.lora_layers)
        if compile_replicas:
            for name, module in {REFERENCE: self.reference, **self.replicas}.items():
                compile_blocks(module, name != SHADOW or backend.fullgraph, compiler)
        if compile_policy:
            compile_blocks(self.transformer, backend=compiler)
        self.batch_sizes = {name: BatchSize(batch_size, pad_to_size=compile_replicas) for name in self.replicas}
        self.batch_sizes[POLICY] = BatchSize(batch_size, pad_to_size=compile_policy)

    @contextmanager
    def use(self, name: str) -> Iterator[nn.Module]:
        """Yield the transformer of a sampler; restores "default" as the active adapter."""
        if name == POLICY:
            with adapters.active_adapter(self.transformer, self.lora_layers, OLD) as transformer:
                yield transformer
        else:
            yield {REFERENCE: self.reference, **self.replicas}[name]

    @contextmanager
    def merged_with(self, state: State) -> Iterator[nn.Module]:
        """Yield the merged replica with the adapter weights ``state``; restores those of the old policy."""
        merged = self.replicas[MERGED]
        try:
            self._write(state, [merged])
            yield merged
        finally:
            self._write(self.adapter_state(OLD), [merged])

    def sync(self) -> None:
        """Write the old policy, merged in float32 and then rounded or quantised, into the replicas in place."""
        self._write(self.adapter_state(OLD), self.replicas.values())

    def start_from(self, lora: Path) -> None:
        """Load a LoRA of diffusers' format into both adapters; raises ``UserError`` if it does not fit."""
        state = adapters.read_lora(lora, self.lora_layers)
        for name in (TRAINED, OLD):
            adapters.load_state(self.lora_layers, name, state)

    def update_old(self, decay: float) -> None:
        """Update the old adapter in place: old <- decay * old + (1 - decay) * trained."""
        adapters.update_old_adapter(self.lora_layers, decay)

    def distances(self) -> dict[str, Tensor]:
        """Distances of the trained weights from the base and from the old policy, relative to the norm of the base."""
        update, difference = adapters.update_norms(self.lora_layers)
        return {"base_distance": update / self._base_norm, "old_distance": difference / self._base_norm}

    @cached_property
    def _base_norm(self) -> Tensor:
        return adapters.base_norm(self.lora_layers)

    def adapter_state(self, name: str) -> State:
        """Return adapter "default" or "old", or zeros for "base"."""
        if name == "base":
            return {key: torch.zeros_like(value) for key, value in self.adapter_state(TRAINED).items()}
        return adapters.adapter_state(self.lora_layers, name)

    def chunks(
        self, transformer: nn.Module, name: str, prompts: EncodedPrompts, seeds: Tensor, spec: SamplingSpec
    ) -> Iterator[Chunk]:
        """Yield sampled chunks of seeds [P, N] from a transformer of `use` or `merged_with`.

        ``name`` is the sampler whose batch size is used.
        """
        return iter_sampled_chunks(self.policy, transformer, self.batch_sizes[name], prompts, seeds, spec)

    @torch.no_grad()
    def _write(self, state: State, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        for name, weight in adapters.merged_weights(self.lora_layers, state):
            for module in modules:
                replica.refresh(module, [(name, weight)])
