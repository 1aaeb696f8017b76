"""A forward and backward pass of a policy on ``meta``: its multiply-adds (MACs) and the bytes of its activations."""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from solrl_lightning.policies import adapters
from solrl_lightning.policies.checkpointing import checkpoint_blocks
from solrl_lightning.policies.pipeline import PipelineAdapter

CHECKPOINTING: tuple[bool | str, ...] = (False, "selective", True)
"""Values of model.gradient_checkpointing."""


class Passes(NamedTuple):
    """MACs of one image, and the bytes of its activations."""

    forward: int
    layers: Mapping[str, int]  # MACs of each linear layer and convolution in a forward pass, by name
    adapted: int  # of a forward pass with LoRA branches
    backward: int  # of a backward pass through frozen weights, with the recomputation of checkpointed blocks
    decode: int
    training_bytes: Mapping[bool | str, int]  # of a forward and backward pass, by model.gradient_checkpointing
    preview: int = 0  # of decoding by the preview decoder, 0 without one
    sampling_bytes: int = 0
    decoding_bytes: int = 0


def flop_counter() -> FlopCounterMode:
    """Return PyTorch's counter, extended by products that are added in place, such as LoRA's."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops})


def _addmm_flops(y: Sequence[int], a: Sequence[int], b: Sequence[int], **unused: Any) -> int:
    """2 m k n of the shapes a [m, k] and b [k, n]."""
    return 2 * a[0] * a[1] * b[1]


def count_macs(run: Callable[[], Any], module: nn.Module) -> tuple[int, dict[str, int]]:
    """MACs of ``run()``, which calls ``module``, and the part of each linear layer and convolution of ``module``."""
    with flop_counter() as counter:
        run()
    counts, root = counter.get_flop_counts(), type(module).__name__
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    layers = {name: sum(counts[f"{root}.{name}"].values()) // 2 for name in names if f"{root}.{name}" in counts}
    return counter.get_total_flops() // 2, layers


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
    policy: PipelineAdapter,
    lora: LoraConfig,
    checkpointing: bool | str,
    previews: bool = False,
    recomputed: Collection[bool | str] = CHECKPOINTING,
) -> tuple[Passes, dict[str, LoraLayer]]:
    """The passes of a policy on ``meta``, and its adapted layers by name. Adds the adapters to the policy.

    ``recomputed``: the values of model.gradient_checkpointing to find the activations of.
    """
    images = 2  # for a batch of one, some operators return views instead of copies
    transformer, vae = policy.transformer, policy.pipeline.vae
    conditioning = policy.encode(images * ["a prompt"])
    x = policy.noise(torch.zeros(images, dtype=torch.int64))
    sigma = torch.ones(images, device=policy.device)

    def velocity() -> Tensor:
        return policy.velocity(transformer, x, sigma, conditioning)

    with torch.no_grad():
        with FusedAttention(), PeakBytes(transformer) as sampling:
            forward, layers = count_macs(velocity, transformer)
        with FusedAttention(), PeakBytes(vae) as decoding:
            decode = count_macs(lambda: policy.decode_latents(x, vae), transformer)[0]
        preview = count_macs(lambda: policy.preview(x), transformer)[0] if previews else 0
    with torch.device(policy.device):  # without it, PEFT creates the adapters on the CPU
        adapted_layers = adapters.add_adapters(transformer, lora, seed=0)
    transformer.train()
    peaks: dict[bool | str, int] = {}
    for blocks in recomputed:
        _checkpoint(transformer, blocks)
        with FusedAttention(), PeakBytes(transformer) as training:
            loss = velocity().sum()
        with training:
            loss.backward()
        transformer.zero_grad()
        peaks[blocks] = training.peak // images
    _checkpoint(transformer, checkpointing)
    with FusedAttention(), flop_counter() as there:  # its hooks keep recomputed tensors alive
        loss = velocity().sum()
    with flop_counter() as back:
        loss.backward()
    flops = there.get_total_flops(), back.get_total_flops()
    return Passes(
        forward=forward // images,
        layers={name: count // images for name, count in layers.items()},
        adapted=flops[0] // 2 // images,
        backward=flops[1] // 2 // images,
        decode=decode // images,
        training_bytes=peaks,
        preview=preview // images,
        sampling_bytes=sampling.peak // images,
        decoding_bytes=decoding.peak // images,
    ), adapted_layers


def _checkpoint(transformer: nn.Module, blocks: bool | str) -> None:
    # Tensor.backward runs outside of the mode, so recomputation enters another mode.
    checkpoint_blocks(transformer, blocks, context_fn=lambda: (nullcontext(), FusedAttention()))
