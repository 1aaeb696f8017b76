"""Pipelines with random weights, for plans and timings at real size without a download.

Transformer and autoencoder are created on their device in their dtype, with weights that keep activations of the order
of one through any number of blocks; the scheduler is the real one. Text encoders are left out: prompts get random
embeddings of the true shapes, a function of their text alone. On the device ``meta`` everything has shapes only.
"""

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from solrl_lightning.policies.architectures import Architecture, Component, build_component
from solrl_lightning.seeds import noise


def random_pipeline(
    architecture: Architecture, device: torch.device | str, dtypes: Mapping[str, torch.dtype]
) -> DiffusionPipeline:
    """Make the pipeline of ``architecture`` without text encoders, its parts on ``device``.

    The weights are equal in every call on equal hardware. ``dtypes`` are by name of the component, and ``default``.
    """
    parts = architecture.components
    cls = getattr(diffusers, architecture.pipeline)
    modules = {
        name: random_component(parts[name], device, dtypes.get(name, dtypes["default"]))
        for name in ("transformer", "vae")
    }
    modules["scheduler"] = build_component(parts["scheduler"], "cpu")
    parameters = inspect.signature(cls.__init__).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty][1:]  # after self
    pipeline = cls(**dict.fromkeys(required) | modules)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def random_component(component: Component, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Any:
    """Make the module on ``device`` in ``dtype``, buffers included, with the weights of ``init_random_weights``."""
    module = build_component(component, device, dtype)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))  # module.to(dtype) warns about diffusers' float32 modules
    init_random_weights(module, seed)
    return module.eval()


@torch.no_grad()
def init_random_weights(module: nn.Module, seed: int) -> None:
    """Set weights in place from N(0, 1 / inputs) and biases to 0; the weights of norms are unchanged.

    Inputs of independent unit variance then give outputs of unit variance; norms before every matrix product keep it.
    Modulation is a projection of a small embedding, so shifts, scales and gates stay below one.
    """
    parameters = list(module.named_parameters())
    if parameters[0][1].is_meta:
        return
    generator = torch.Generator(parameters[0][1].device).manual_seed(seed)
    for name, parameter in parameters:
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()


def random_row(prompt: str, like: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return random embeddings of one prompt, a function of its text and their names, with the shapes and dtypes of
    ``like``.

    Floating ones are standard normal, others (masks) 1.
    """
    row = {}
    for name, value in like.items():
        if value.is_floating_point():
            identity = hashlib.blake2b(f"{name}/{prompt}".encode(), digest_size=4).digest()
            row[name] = noise(torch.tensor([int.from_bytes(identity, "little")]), tuple(value.shape))[0].to(device)
        else:
            row[name] = torch.ones(value.shape, dtype=value.dtype, device=device)
    return row
