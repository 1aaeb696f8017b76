"""model.train=full: every parameter of the transformer is trained.

| weights | dtype | kept for |
|---|---|---|
| trained | float32 | the optimiser, because a step of 1e-5 is rounded away in bfloat16 |
| old policy | float32 | its moving average, in which a rounded share of a step would be lost, too |
| base model | as loaded | the reference, and distances from it |
| the copy that computes | as loaded | forward and backward passes, of the trained weights or of the old policy |

The rounded copy is made anew for each forward pass, by operators that autograd records. So products and activations
have the dtypes of the loaded model, as the replicas' do, while gradients arrive at the float32 weights and are summed
there.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from solrl_lightning.names import OLD, TRAINED
from solrl_lightning.policies import replica
from solrl_lightning.policies.lora import State, norm_of_all
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.training.transformers import TrainedTransformer


class FullTransformer(TrainedTransformer):
    """The policy's transformer, of which everything is trained. A state has all parameters by name.

    Args:
        transformer: computes; its loaded parameters stay as the base model.
        device: of the trained and old weights; None: the device of ``transformer``.
    """

    weights: nn.ModuleDict
    folder: ClassVar[str] = "transformer"
    exports: ClassVar[Mapping[str, str]] = {"transformer_trained": "default"}
    storages: ClassVar[Collection[str]] = ("bfloat16",)

    def __init__(self, transformer: ModelMixin, device: str | None = None) -> None:
        self.transformer: ModelMixin = transformer.train()  # none of these models has dropout
        self._base: State = {name: parameter.detach() for name, parameter in transformer.named_parameters()}
        copies = {name: _in_float32(transformer, name == TRAINED, device) for name in (TRAINED, OLD)}
        self.weights = nn.ModuleDict(copies)
        self._saved = {f"{name}.{parameter}" for name in (TRAINED, OLD) for parameter in self._base}
        self.base_norm = norm_of_all(self._base.values())

    @property
    def replaced(self) -> list[str]:
        return list(self._base)

    def is_saved(self, name: str) -> bool:
        return name in self._saved

    def freeze(self, layers: Iterable[str]) -> None:
        for name in layers:
            self.weights[TRAINED].get_submodule(name).requires_grad_(False)

    def state(self, name: str) -> State:
        if name == "base":
            return self._base
        return {name: parameter.detach() for name, parameter in self.weights[name].named_parameters()}

    @contextmanager
    def current(self) -> Iterator[nn.Module]:
        self._compute_with(dict(self.weights[TRAINED].named_parameters()))
        yield self.transformer

    @contextmanager
    def old(self, state: State | None = None) -> Iterator[nn.Module]:
        self._compute_with(self.state(OLD) if state is None else state)
        yield self.transformer

    def _compute_with(self, state: State) -> None:
        for path, base in self._base.items():
            layer, _, name = path.rpartition(".")
            # Not a parameter but a function of one, which nn.Module's own setters do not take.
            self.transformer.get_submodule(layer)._parameters[name] = state[path].to(base)

    def distances(self) -> dict[str, Tensor]:
        trained = self.state(TRAINED)
        return {
            f"{name}_distance": self._norm(trained[path] - other for path, other in self.state(name).items())
            / self.base_norm
            for name in ("base", OLD)
        }

    def _norm(self, tensors: Iterator[Tensor]) -> Tensor:
        return norm_of_all(tensors)

    def write(self, module: nn.Module, state: State) -> None:
        replica.write_parameters(module, state.items())

    def save(self, model: PipelineAdapter, folder: Path, state: State) -> None:
        with self.old(state) as transformer:
            model.save_transformer(folder, transformer)


def _in_float32(transformer: nn.Module, trained: bool, device: str | None) -> nn.Module:
    """Return a copy of the module tree with float32 parameters, and with the original's buffers."""
    copies = {
        id(parameter): nn.Parameter(parameter.detach().to(device, torch.float32, copy=True), requires_grad=trained)
        for parameter in transformer.parameters()
    }
    return copy.deepcopy(transformer, copies | {id(buffer): buffer for buffer in transformer.buffers()})
