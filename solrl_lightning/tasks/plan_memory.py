"""Bytes of a run on one device, and the options with which it fits a card.

Not counted: reward models, because only their files have their size; the text encoders' activations; CUDA and the
allocator. ``task.reserve`` leaves room for them.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from solrl_lightning.policies.architectures import Architecture, build_component
from solrl_lightning.tasks.plan_trace import CHECKPOINTING

STORAGE_BITS = {"bfloat16": 16.0, "int8": 8.0, "nf4": 4.127}
"""Bits of a weight in ``base_weights``; those of a row's scale in int8 are less than 0.04."""

_FEWEST_ROWS = 3
"""Micro-batches below this are the last resort, with all blocks recomputed: small products leave a GPU idle."""


class Options(NamedTuple):
    """The options of a run that determine its memory."""

    base_weights: str
    shadow: bool
    encode_on: str
    gradient_checkpointing: bool | str
    micro_batch: int
    rollout_batch: int
    decode_batch: int


class Footprint(NamedTuple):
    """Bytes on one device."""

    policy: Mapping[str, int]  # by base_weights
    shadow: int
    others: int  # merged replica, adapters, their gradients and moments, autoencoder
    text_encoders: int
    training: Mapping[bool | str, int]  # activations of a row, by gradient_checkpointing
    sampling: int  # activations of a candidate
    decoding: int  # activations of an image

    def peak(self, options: Options) -> int:
        """Bytes of the weights and of the stage that needs most; decoding overlaps with sampling."""
        held = self.policy[options.base_weights] + self.others + options.shadow * self.shadow
        encoding = self.text_encoders if options.encode_on == "device" else 0
        training = options.micro_batch * self.training[options.gradient_checkpointing]
        rollout = options.rollout_batch * self.sampling + options.decode_batch * self.decoding
        return held + max(encoding, training, rollout)


def fit(footprint: Footprint, most: Options, room: int) -> Options:
    """Return the first options that need at most ``room`` bytes, or, where none do, those that need least.

    Order of preference: weights in BF16 or int8 with a shadow, then without, then nf4; text encoders on the device; no
    recomputation rather than a large micro-batch; large rollout batches, then large decoding batches. No batch exceeds
    that of ``most``.
    """
    storages = list(STORAGE_BITS)[list(STORAGE_BITS).index(most.base_weights) :]
    exact = [name for name in storages if name != "nf4"]
    weights = [*product([True, False], exact), *product([True, False], ["nf4"])]
    rows = halvings(most.micro_batch)
    enough = [n for n in rows if n >= min(_FEWEST_ROWS, most.micro_batch)]
    training = [*product(CHECKPOINTING, enough), *product([True], rows)]
    rollout = list(product(halvings(most.rollout_batch), halvings(most.decode_batch)))
    tried = [
        Options(base, shadow, device, *training_options, *rollout_options)
        for (shadow, base), device, training_options, rollout_options in product(
            weights, ("device", "cpu"), training, rollout
        )
        if shadow <= most.shadow
    ]
    peaks = [footprint.peak(options) for options in tried]
    fitting = (options for options, peak in zip(tried, peaks, strict=True) if peak <= room)
    return next(fitting, tried[peaks.index(min(peaks))])


def halvings(number: int) -> list[int]:
    """``number``, its half rounded down, and so on to 1."""
    return [number >> shift for shift in range(number.bit_length())]


def overrides(options: Options, most: Options) -> list[str]:
    """The command-line arguments that change ``most`` into ``options``."""
    keys = {"base_weights": "base_weights", "encode_on": "encode_on"}
    changed = [
        f"{keys.get(name, f'model.{name}')}={str(value).lower()}"
        for name, value, before in zip(Options._fields, options, most, strict=True)
        if value != before and name != "shadow"
    ]
    return changed if options.shadow == most.shadow else ["family=prefix", *changed]


# Weights


def bytes_of(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    return sum(tensor.numel() * tensor.itemsize for tensor in chain(module.parameters(), module.buffers()))


def replica_bytes(
    weights: Mapping[str, Tensor], adapted: Collection[str], quantized: Collection[str] = (), bits: float = 16
) -> int:
    """Bytes of the ``weights`` that a replica owns: the quantised ones at ``bits``, and others that LoRA adapts."""
    packed = sum(weights[name].numel() for name in quantized) * bits / 8
    own = sum(weights[name].numel() * weights[name].itemsize for name in adapted if name not in quantized)
    return math.ceil(packed) + own


def stored_bytes(whole: int, layers: Iterable[nn.Linear]) -> dict[str, int]:
    """Bytes of a transformer of ``whole`` bytes whose frozen ``layers`` are stored, by ``base_weights``."""
    weights = [layer.weight for layer in layers]
    saved = sum(weight.numel() * weight.itemsize for weight in weights)
    stored = sum(weight.numel() for weight in weights)
    return {name: whole - saved + math.ceil(stored * bits / 8) for name, bits in STORAGE_BITS.items()} | {
        "bfloat16": whole
    }


def encoder_bytes(architecture: Architecture, dtypes: Mapping[str, torch.dtype]) -> int:
    """Bytes of the text encoders in their dtypes."""
    parts = {name: part for name, part in architecture.components.items() if name.startswith("text_encoder")}
    return sum(
        bytes_of(build_component(part, "meta", dtypes.get(name, dtypes["default"]))) for name, part in parts.items()
    )
