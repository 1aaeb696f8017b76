"""A forward and backward pass of a model on ``meta``: the tokens of its layers and the bytes of its activations."""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers import ModelMixin
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.policies.checkpointing import checkpoint_blocks
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.training.transformers import TrainedTransformer

CHECKPOINTING: tuple[bool | str, ...] = (False, "selective", True)
"""Values of model.gradient_checkpointing."""


class Passes(NamedTuple):
    """Tokens of one image, and the bytes of its activations."""

    tokens: Mapping[str, int]  # of each linear layer and convolution, by name
    training_bytes: Mapping[bool | str, int]  # of a forward and backward pass, by model.gradient_checkpointing
    sampling_bytes: int
    decoding_bytes: int


def count_tokens(run: Callable[[], Any], module: nn.Module) -> dict[str, int]:
    """Return the tokens that each linear layer and convolution of ``module`` returns in ``run()``, by name."""
    tokens: Counter[str] = Counter()

    def count(name: str, layer: nn.Linear | nn.Conv2d, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        tokens[name] += output.numel() // (layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features)

    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(partial(count, name)) for name, layer in layers]
    run()
    for hook in hooks:
        hook.remove()
    return dict(tokens)


class FusedAttention(TorchFunctionMode):
    """Runs attention as a GPU does. On ``meta``, PyTorch's own computes and saves the matrix of all pairs of tokens."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            func = _flash_attention
        return func(*args, **(kwargs or {}))


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, **unused: Any) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that operators return, each storage once, without a module's parameters.

    ``peak`` is the largest sum so far. The mode may be entered again, for the backward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in module.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return result

    def _freed(self, address: int, size: int) -> None:
        self._known.remove(address)
        self._now -= size


def trace(
    model: PipelineAdapter, train: Callable[[ModelMixin], TrainedTransformer]
) -> tuple[Passes, TrainedTransformer]:
    """Build the passes of a model on ``meta``, and its trained transformer, which ``train`` makes of the loaded one."""
    images = 2  # for a batch of one, some operators return views instead of copies
    transformer, vae = model.transformer, model.pipeline.vae
    conditioning = model.encode(images * [Prompt("a prompt")])
    x = model.noise(torch.zeros(images, dtype=torch.int64))
    sigma = torch.ones(images, device=model.device)

    def velocity() -> Tensor:
        return model.velocity(transformer, x, sigma, conditioning)

    def free_gradient(parameter: Tensor) -> None:
        parameter.grad = None  # counted apart from the activations

    with torch.no_grad(), FusedAttention():
        with PeakBytes(transformer) as sampling:
            tokens = count_tokens(velocity, transformer)
        with PeakBytes(vae) as decoding:
            model.decode_latents(x, vae)
    with torch.device(model.device):  # without it, PEFT creates the adapters on the CPU
        trained = train(transformer)
    if trained.weights is not transformer:  # which is then a copy of them
        transformer.requires_grad_()
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(free_gradient)
    peaks: dict[bool | str, int] = {}
    for blocks in CHECKPOINTING:
        # Tensor.backward runs outside of the mode, so recomputation enters another mode.
        checkpoint_blocks(transformer, blocks, context_fn=lambda: (nullcontext(), FusedAttention()))
        with FusedAttention(), PeakBytes(transformer) as training:
            loss = velocity().sum()
        with training:
            loss.backward()
        peaks[blocks] = training.peak // images
    return Passes(
        tokens={name: count // images for name, count in tokens.items()},
        training_bytes=peaks,
        sampling_bytes=sampling.peak // images,
        decoding_bytes=decoding.peak // images,
    ), trained
