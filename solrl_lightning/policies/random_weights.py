"""Pipelines with random weights, for plans and timings at real size without a download.

Transformer and autoencoder are made on their device in their dtype, with weights that keep activations of the order of
one through any number of blocks; the scheduler is the real one. Text encoders are left out: prompts get random
embeddings of the true shapes, a function of their text alone. On the device ``meta`` everything has shapes only.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from solrl_lightning.policies.architectures import Architecture, Component, build
from solrl_lightning.seeds import noise

DTYPES = {"transformer": torch.bfloat16, "default": torch.float32}
_CLIP_TOKENS = 77  # of the CLIP embeddings before those of T5 in Stable Diffusion 3


class NoEncoder(nn.Module):
    """Stands where a text encoder would."""


def random_pipeline(
    architecture: Architecture,
    device: torch.device | str,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    seed: int = 0,
) -> DiffusionPipeline:
    """The pipeline of ``architecture``, with its parts on ``device``; ``dtypes`` by part, as in ``from_pretrained``.

    ``encode_prompt`` gives random embeddings. Equal seeds give equal weights on equal hardware.
    """
    parts = architecture.components
    cls = getattr(diffusers, architecture.pipeline)
    names = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
    modules: dict[str, Any] = {name: NoEncoder() if name.startswith("text_encoder") else None for name in names}
    for name in ("transformer", "vae"):
        modules[name] = random_component(parts[name], device, dtypes.get(name, dtypes["default"]), seed)
    modules["scheduler"] = build(parts["scheduler"], "cpu")
    pipeline = cls(**{name: module for name, module in modules.items() if module is not None or name in _required(cls)})
    pipeline.encode_prompt = _Embeddings(pipeline, torch.device(device))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def random_component(component: Component, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Any:
    """The module on ``device`` in ``dtype``, buffers included, with ``initialise``'s weights."""
    module = build(component, device, dtype)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))  # module.to(dtype) would warn of what diffusers keeps in float32
    initialise(module, seed)
    return module.eval()


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Weights in place from N(0, 1 / inputs), biases 0; the weights of norms stay as they are.

    Inputs of independent unit variance so give outputs of unit variance, which the norms before every matrix product
    keep up. Modulation is a projection of a small embedding, so shifts, scales and gates stay below one.
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


def random_embedding(prompts: list[str], name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """float32 [P, *shape] of standard normal numbers; each row a function of its prompt and of ``name``."""
    return noise(torch.tensor([_seed(f"{name}/{prompt}") for prompt in prompts]), shape).to(device)


class _Embeddings:
    """``encode_prompt`` of a pipeline without encoders."""

    def __init__(self, pipeline: DiffusionPipeline, device: torch.device) -> None:
        self.config, self.device = pipeline.transformer.config, device
        self.make = _ENCODED[type(pipeline).__name__]

    def __call__(self, prompt: str | list[str], *, max_sequence_length: int, **unused: Any) -> tuple[Any, ...]:
        prompts = [prompt] if isinstance(prompt, str) else prompt

        def embedding(name: str, *shape: int) -> Tensor:
            return random_embedding(prompts, name, shape, self.device)

        return self.make(self.config, max_sequence_length, embedding)


def _flux1(config: Any, tokens: int, embedding: Callable[..., Tensor]) -> tuple[Any, ...]:
    """Embeddings [P, L, D], pooled [P, D'], text ids [L, 3]."""
    embeds = embedding("embeds", tokens, config.joint_attention_dim)
    return embeds, embedding("pooled", config.pooled_projection_dim), embeds.new_zeros(tokens, 3)


def _sd3(config: Any, tokens: int, embedding: Callable[..., Tensor]) -> tuple[Any, ...]:
    """Embeddings [P, 77 + L, D], none of a negative prompt, pooled [P, D'], none of a negative prompt."""
    embeds = embedding("embeds", _CLIP_TOKENS + tokens, config.joint_attention_dim)
    return embeds, None, embedding("pooled", config.pooled_projection_dim), None


def _sana(config: Any, tokens: int, embedding: Callable[..., Tensor]) -> tuple[Any, ...]:
    """Embeddings [P, L, D], their mask [P, L], none of a negative prompt."""
    embeds = embedding("embeds", tokens, config.caption_channels)
    return embeds, torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device), None, None


_ENCODED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "FluxPipeline": _flux1,
    "StableDiffusion3Pipeline": _sd3,
    "SanaPipeline": _sana,
}


def _required(cls: type) -> set[str]:
    parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    return {parameter.name for parameter in parameters if parameter.default is parameter.empty}


def _seed(identity: str) -> int:
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=4).digest(), "little")
