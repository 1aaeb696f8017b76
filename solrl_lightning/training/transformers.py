"""The transformers of a run: the trained one, and replicas that share its frozen weights.

With model.train=lora the trained one has adapters (`AdaptedTransformer`); with full all its weights are trained
(``full.FullTransformer``, and ``sharded_full`` with trainer=fsdp).

| name | weights | transformer |
|---|---|---|
| policy | old policy, LoRA branches | the trained one with adapter "old" active, or with its weights |
| merged | old policy, LoRA merged in float32 (TF32 on a GPU) and rounded to BF16 | replica |
| shadow | old policy, merged and quantised | replica, if a stage samples from it |
| reference | base model without adapters | replica |

The first three sample (see ``samplers``). In training, the objective reads velocities of the old policy (policy)
and of the reference. Replicas are not submodules of the LightningModule, so checkpoints, optimisers and DDP do
not see them.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from diffusers import DiffusionPipeline, ModelMixin
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from solrl_lightning.names import MERGED, OLD, POLICY, REFERENCE, SHADOW, TRAINED, Storage
from solrl_lightning.policies import lora, replica
from solrl_lightning.policies.base_weights import dense
from solrl_lightning.policies.compilation import compile_blocks
from solrl_lightning.policies.lora import State
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.quantization import Backend, QuantizationRule, convert, format_table
from solrl_lightning.quantization import plan as plan_quantization
from solrl_lightning.quantization.shared_inputs import sharing_inputs
from solrl_lightning.rollout.chunks import BatchSize
from solrl_lightning.rollout.stage import EXPLORE, Stage
from solrl_lightning.training.samplers import Explorers, LocalSampler, Sampler

log = logging.getLogger(__name__)

VelocityModel = Callable[[], AbstractContextManager[nn.Module]]
"""A context with the transformer that computes a velocity of `Objective.needs`."""


class TrainedTransformer(ABC):
    """The policy's transformer: its trained weights, the old policy's, and how replicas get them.

    A *state* is a dict of the trained tensors by name, in float32; DTensors if ranks share them.
    """

    folder: ClassVar[str]
    """Where a run saves the result, in its folder."""
    exports: ClassVar[Mapping[str, str]]
    """Folders that task=export writes beside the merged transformer, and the name of the weights in each."""
    storages: ClassVar[Collection[str]]
    """Values of base_weights that the frozen weights may have."""
    alpha: float | None = None
    """``model.lora.alpha``; None without a LoRA."""
    transformer: ModelMixin
    """Computes velocities, in the contexts ``current`` and ``old``."""
    weights: nn.Module
    """The module whose parameters that require gradients are trained."""
    base_norm: Tensor
    """L2 norm of the weights of the base model that are trained, or adapted."""

    @property
    @abstractmethod
    def replaced(self) -> Sequence[str]:
        """Names of the transformer's parameters that a replica copies."""

    @abstractmethod
    def is_saved(self, name: str) -> bool:
        """Return whether a checkpoint has the named tensor of ``weights``, and DDP makes it equal on all ranks."""

    @abstractmethod
    def state(self, name: str) -> State:
        """Return the weights "default" (trained) or "old", the tensors themselves, or the model's weights, "base"."""

    @abstractmethod
    def freeze(self, layers: Iterable[str]) -> None:
        """Do not train these layers; DDP waits for a gradient of every weight that is trained."""

    @abstractmethod
    def current(self) -> AbstractContextManager[nn.Module]:
        """Yield the transformer with the trained weights, and with gradients to them where enabled.

        It keeps them until another context is entered, for a backward pass that recomputes activations.
        """

    @abstractmethod
    def old(self, state: State | None = None) -> AbstractContextManager[nn.Module]:
        """Yield the transformer with the weights of the old policy, or with ``state``."""

    @torch.no_grad()
    def update_old(self, decay: float) -> None:
        """Update the old policy in place: old <- decay * old + (1 - decay) * trained."""
        old, trained = self.state(OLD), self.state(TRAINED)
        torch._foreach_lerp_(list(old.values()), list(trained.values()), 1.0 - decay)

    @abstractmethod
    def distances(self) -> dict[str, Tensor]:
        """Return the L2 distances of the trained weights from base and old policy, relative to ``base_norm``."""

    @abstractmethod
    def write(self, module: nn.Module, state: State) -> None:
        """Write ``state`` into a replica in place, so that compiled code stays valid."""

    @abstractmethod
    def save(self, model: PipelineAdapter, folder: Path, state: State) -> None:
        """Write ``state``, of whole tensors, into ``folder`` in a format of diffusers."""


class AdaptedTransformer(TrainedTransformer):
    """The policy's transformer with its adapters "default", which is trained, and "old", which samples.

    Args:
        transformer: gets the adapters.
        config: rank, alpha and target modules of the adapters.
        seed: seed of the adapters' initial values.
    """

    folder: ClassVar[str] = "lora"
    exports: ClassVar[Mapping[str, str]] = {"lora_ema": "ema", "lora_trained": "default"}
    storages: ClassVar[Collection[str]] = get_args(Storage)

    def __init__(self, transformer: ModelMixin, config: LoraConfig, seed: int) -> None:
        self.transformer = self.weights = transformer.train()  # none of these models has dropout
        self.lora_layers: dict[str, LoraLayer] = lora.add_adapters(transformer, config, seed)
        self.config, self.alpha = transformer.peft_config[TRAINED], config.lora_alpha
        bases = (dense(layer.get_base_layer().weight) for layer in self.lora_layers.values())
        self.base_norm = lora.norm_of_all(bases)  # before a strategy shards the weights

    @property
    def replaced(self) -> list[str]:
        return [f"{name}.weight" for name in self.lora_layers]

    def is_saved(self, name: str) -> bool:
        return ".lora_" in name

    def freeze(self, layers: Iterable[str]) -> None:
        lora.freeze_adapters(self.lora_layers, layers)

    def current(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.transformer)

    def state(self, name: str) -> State:
        if name == "base":
            return {key: torch.zeros_like(value) for key, value in self.state(TRAINED).items()}
        return lora.adapter_state(self.lora_layers, name)

    @contextmanager
    def old(self, state: State | None = None) -> Iterator[nn.Module]:
        weights = nullcontext() if state is None else lora.with_weights(self.lora_layers, OLD, state)
        with weights, lora.active_adapter(self.transformer, self.lora_layers, OLD) as transformer:
            yield transformer

    def start_from(self, file: Path, pipeline_class: type[DiffusionPipeline]) -> None:
        """Load a LoRA into both adapters; raises ``UserError`` if it does not fit (`read_lora`)."""
        state = lora.read_lora(file, self.transformer, self.lora_layers, pipeline_class)
        for name in (TRAINED, OLD):
            lora.load_state(self.lora_layers, name, state)

    def distances(self) -> dict[str, Tensor]:
        update, difference = lora.update_norms(self.lora_layers)
        return {"base_distance": update / self.base_norm, "old_distance": difference / self.base_norm}

    def write(self, module: nn.Module, state: State) -> None:
        replica.write_parameters(module, lora.merged_weights(self.lora_layers, state))

    def save(self, model: PipelineAdapter, folder: Path, state: State) -> None:
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        model.save_lora(folder, tensors, self.config)


@dataclass(frozen=True)
class Transformers:
    """The trained transformer, and everything that samples or computes velocities beside it."""

    trained: TrainedTransformer
    samplers: Mapping[str, Sampler]
    """By the name in `Stage.sampler`."""
    velocity_models: Mapping[str, VelocityModel]
    """By the name in `Objective.needs`."""
    replicas: Mapping[str, nn.Module] = field(default_factory=dict)
    """Replicas of the old policy by the name of their sampler."""
    shadow_backend: Backend | None = None
    shadow_layers: str = ""
    """Table of the shadow's linear layers."""
    explorers: Explorers | None = None
    """What stages explore with instead, if other processes explore."""

    def named_samplers(self) -> Iterator[tuple[str, Sampler]]:
        """Yield everything that samples."""
        yield from self.samplers.items()
        if self.explorers is not None:
            yield "explorers", self.explorers

    def sampler(self, stage: Stage) -> Sampler:
        """Return what samples ``stage``."""
        if stage.name == EXPLORE and self.explorers is not None:
            return self.explorers
        return self.samplers[stage.sampler]

    @property
    def precision_backend(self) -> str:
        """The precision and backend of the shadow, or of the explorers' shadows, as text."""
        if self.explorers is not None:
            return self.explorers.precision
        shadow = self.shadow_backend
        return "no shadow" if shadow is None else f"{shadow.precision} ({shadow.name})"


def as_it_is(transformer: nn.Module) -> Callable[..., AbstractContextManager[nn.Module]]:
    """Return contexts with a transformer as it is, whatever the weights that are asked for."""
    return lambda state=None: nullcontext(transformer)


def replicate(
    model: PipelineAdapter,
    train: Callable[[ModelMixin], TrainedTransformer],
    batch_size: int,
    compile_replicas: bool,
    compile_policy: bool,
    with_shadow: bool,
    backend: Backend,
    rule: QuantizationRule,
    compiler: str | Callable[..., Any] = "inductor",
) -> Transformers:
    """Return the transformers of a device that holds the whole model.

    Args:
        model: as loaded; its transformer is trained.
        train: makes the trained transformer of ``model.transformer``.
        batch_size: candidates per forward pass.
        compile_replicas, compile_policy: compile the blocks of the replicas, and of the trained transformer.
        backend, rule: arithmetic of the shadow, if there is one, and the layers to quantise.
    """
    clone = replica.clone_sharing_weights
    reference = clone(model.transformer).eval()
    replicas = {name: clone(model.transformer).eval() for name in ([MERGED, SHADOW] if with_shadow else [MERGED])}
    trained = train(model.transformer)
    trained.freeze(model.unused_layers)
    shadow_layers = ""
    if with_shadow:
        plans = plan_quantization(replicas[SHADOW], rule, backend)
        log.info("%s", backend.description)
        shadow_layers = format_table(plans)
        convert(replicas[SHADOW], plans, backend)
    for module in replicas.values():
        replica.untie_parameters(module, trained.replaced)
    if compile_replicas:
        for module in (reference, replicas[MERGED]):
            compile_blocks(module, backend=compiler)
        if with_shadow:
            compile_blocks(replicas[SHADOW], backend.fullgraph, sharing_inputs(compiler))
    if compile_policy:
        compile_blocks(trained.transformer, backend=compiler)
    samplers: dict[str, Sampler] = {}
    for name, module in replicas.items():
        size = BatchSize(batch_size, pad_to_size=compile_replicas)
        samplers[name] = LocalSampler(model, as_it_is(module), size, partial(trained.write, module))
    samplers[POLICY] = LocalSampler(model, trained.old, BatchSize(batch_size, pad_to_size=compile_policy))
    velocity_models = {OLD: trained.old, REFERENCE: as_it_is(reference)}
    return Transformers(trained, samplers, velocity_models, replicas, backend if with_shadow else None, shadow_layers)
