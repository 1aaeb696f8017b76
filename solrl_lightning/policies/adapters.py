"""The policy's LoRA adapters: "default" is trained, "old" samples.

Adapter weights are float32 beside the bfloat16 base: a step of 3e-4 would vanish in bfloat16. A *state* is a dict of
``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``, the names under which diffusers saves a LoRA.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from diffusers import ModelMixin
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from solrl_lightning.errors import UserError

TRAINED, OLD = "default", "old"
State = dict[str, Tensor]


def add_adapters(transformer: ModelMixin, config: LoraConfig, seed: int) -> dict[str, LoraLayer]:
    """Adds both adapters, equal and without effect (B = 0), and returns the adapted layers by name.

    Raises:
        UserError: a target of ``config`` is no layer of the transformer.
    """
    names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    targets = sorted(map(str, config.target_modules or ()))
    unknown = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unknown or not targets:
        raise UserError(
            f"model.lora.target_modules={targets} is invalid: it must list layers of {type(transformer).__name__} by "
            f"the ends of their names{', which has none named ' + ', '.join(unknown) if unknown else ''}. "
            "Leave it out for those of the model's file."
        )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two adapters are what we want
        torch.manual_seed(seed)
        for name in (OLD, TRAINED):
            transformer.add_adapter(config, adapter_name=name)
    layers = {name: module for name, module in transformer.named_modules() if isinstance(module, LoraLayer)}
    for layer in layers.values():
        for weights in (layer.lora_A, layer.lora_B):
            weights.float()
    load_state(layers, OLD, adapter_state(layers, TRAINED))
    _activate(layers, TRAINED)
    return layers


class InputDtypeLinear(nn.Linear):
    """A linear layer of float32 weights whose product is in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def multiply_in_input_dtype(layers: dict[str, LoraLayer]) -> None:
    """Turns the factors of every adapter into ``InputDtypeLinear``; peft would cast activations to float32 instead."""
    for layer in layers.values():
        layer.cast_input_dtype_enabled = False
        for factor in chain(layer.lora_A.values(), layer.lora_B.values()):
            factor.__class__ = InputDtypeLinear


def adapter_state(layers: dict[str, LoraLayer], adapter: str) -> State:
    """The adapter's weights; the tensors themselves, not copies."""
    state = {}
    for name, layer in layers.items():
        state[f"{name}.lora_A.weight"] = layer.lora_A[adapter].weight.detach()
        state[f"{name}.lora_B.weight"] = layer.lora_B[adapter].weight.detach()
    return state


def load_state(layers: dict[str, LoraLayer], adapter: str, state: State) -> None:
    for name, weight in adapter_state(layers, adapter).items():
        weight.copy_(state[name])


def update_old_adapter(layers: dict[str, LoraLayer], decay: float) -> None:
    """old <- decay * old + (1 - decay) * default, in place."""
    old, trained = adapter_state(layers, OLD), adapter_state(layers, TRAINED)
    torch._foreach_lerp_(list(old.values()), list(trained.values()), 1.0 - decay)


def merged_weights(layers: dict[str, LoraLayer], state: State) -> Iterator[tuple[str, Tensor]]:
    """Yields each adapted layer's name and float32 weight W + (alpha / r) B A."""
    for name, layer in layers.items():
        down, up = state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"]
        base = layer.get_base_layer().weight
        yield name, torch.addmm(base.float(), up.float(), down.float(), alpha=layer.scaling[TRAINED])


@contextmanager
def active_adapter(transformer: nn.Module, layers: dict[str, LoraLayer], adapter: str) -> Iterator[nn.Module]:
    """The transformer under another adapter; "default" is active again afterwards."""
    _activate(layers, adapter)
    try:
        yield transformer
    finally:
        _activate(layers, TRAINED)


def _activate(layers: dict[str, LoraLayer], adapter: str) -> None:
    for layer in layers.values():
        layer.set_adapter(adapter, inference_mode=adapter != TRAINED)  # only "default" ever requires gradients
