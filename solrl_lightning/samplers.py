"""Which weights sample: the policy with its LoRA adapters, and the replicas that share its frozen weights.

| name | weights | transformer |
|---|---|---|
| policy | old policy, LoRA branches | the trained one, adapter "old" active |
| merged | old policy, LoRA merged in float32 and rounded to BF16 | replica |
| shadow | old policy, merged and quantised | replica, where a stage samples from it |
| reference | the base model, without adapters | replica |

Replicas are no submodules of the LightningModule: not in checkpoints, optimisers or DDP.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from solrl_lightning.policies import adapters, replica
from solrl_lightning.policies.adapters import OLD, TRAINED, State
from solrl_lightning.policies.compilation import compile_blocks
from solrl_lightning.policies.pipeline import PipelinePolicy
from solrl_lightning.quantization import Backend, QuantizationRule, convert, format_table
from solrl_lightning.quantization import plan as plan_quantization
from solrl_lightning.rollout.records import EncodedPrompts
from solrl_lightning.rollout.stage import BatchSize, Chunk, SamplingSpec, iter_sampled_chunks

log = logging.getLogger(__name__)

POLICY, MERGED, SHADOW, REFERENCE = "policy", "merged", "shadow", "reference"


class Samplers:
    """The transformers that sample a policy, and how many candidates each takes at once.

    Args:
        policy: the architecture with its loaded weights; its transformer gets the adapters.
        lora: rank, alpha and target modules of the adapters.
        seed: of the adapters.
        batch_size: candidates in one forward pass.
        compile: compile the blocks of the replicas.
        with_shadow: make the quantised replica.
        backend, rule: its arithmetic and the layers that it covers.
    """

    def __init__(
        self,
        policy: PipelinePolicy,
        lora: LoraConfig,
        seed: int,
        batch_size: int,
        compile: bool,
        with_shadow: bool,
        backend: Backend,
        rule: QuantizationRule,
    ) -> None:
        self.policy, self.backend = policy, backend
        self.transformer = policy.transformer.train()  # none of these models has dropout
        self.reference = replica.clone_sharing_weights(self.transformer).eval()
        names = [MERGED, SHADOW] if with_shadow else [MERGED]
        self.replicas = {name: replica.clone_sharing_weights(self.transformer).eval() for name in names}
        """Of the old policy, by name."""
        self.layer_table = ""
        """Of the shadow: which linear layers are quantised."""
        self.precision_backend = f"{backend.precision} ({backend.name})" if with_shadow else "no shadow"
        if with_shadow:
            plans = plan_quantization(self.replicas[SHADOW], rule, backend)
            log.info("%s", backend.description)
            self.layer_table = format_table(plans)
            convert(self.replicas[SHADOW], plans, backend)
        self.lora_layers: dict[str, LoraLayer] = adapters.add_adapters(self.transformer, lora, seed)
        if policy.device.type == "cuda":  # as under the published code's autocast
            adapters.multiply_in_input_dtype(self.lora_layers)
        for module in self.replicas.values():
            replica.untie_weights(module, self.lora_layers)
        if compile:
            for name, module in {REFERENCE: self.reference, **self.replicas}.items():
                compile_blocks(module, fullgraph=name != SHADOW or backend.fullgraph)
        self.batch_sizes = {
            name: BatchSize(batch_size, pad_to_size=compile and name != POLICY) for name in (POLICY, *self.replicas)
        }

    @contextmanager
    def use(self, name: str) -> Iterator[nn.Module]:
        """The transformer of a sampler; "default" is the policy's active adapter again afterwards."""
        if name == POLICY:
            with adapters.active_adapter(self.transformer, self.lora_layers, OLD) as transformer:
                yield transformer
        else:
            yield {REFERENCE: self.reference, **self.replicas}[name]

    @contextmanager
    def merged_with(self, state: State) -> Iterator[nn.Module]:
        """The merged replica with the adapter weights ``state``; those of the old policy are back afterwards."""
        merged = self.replicas[MERGED]
        self._write(state, [merged])
        try:
            yield merged
        finally:
            self._write(self.adapter_state(OLD), [merged])

    def sync(self) -> None:
        """Write the old policy into the replicas: merged in float32, then rounded or re-quantised, in place."""
        self._write(self.adapter_state(OLD), self.replicas.values())

    def update_old(self, decay: float) -> None:
        """old <- decay * old + (1 - decay) * trained, in place."""
        adapters.update_old_adapter(self.lora_layers, decay)

    def adapter_state(self, name: str) -> State:
        """Return adapter "default" or "old", or "base": no adapter at all, as zeros."""
        if name == "base":
            return {key: torch.zeros_like(value) for key, value in self.adapter_state(TRAINED).items()}
        return adapters.adapter_state(self.lora_layers, name)

    def chunks(
        self, transformer: nn.Module, name: str, prompts: EncodedPrompts, seeds: Tensor, spec: SamplingSpec
    ) -> Iterator[Chunk]:
        """Sample seeds [P, N] with a transformer of `use` or `merged_with`, in the batches of sampler ``name``."""
        return iter_sampled_chunks(self.policy, transformer, self.batch_sizes[name], prompts, seeds, spec)

    @torch.no_grad()
    def _write(self, state: State, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        for name, weight in adapters.merged_weights(self.lora_layers, state):
            for module in modules:
                replica.refresh(module, [(name, weight)])
