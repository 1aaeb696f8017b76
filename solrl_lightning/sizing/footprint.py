"""Bytes of a run on one device, and the options with which it fits a card.

Not counted: reward models, because only their files have their size; the text encoders' activations; CUDA and the
allocator. ``task.reserve`` leaves room for them.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from solrl_lightning.artifacts.complete import reading
from solrl_lightning.names import AUTO
from solrl_lightning.policies.architectures import Architecture, build_component
from solrl_lightning.rollout.stage import Stage, candidates_per_prompt, with_next
from solrl_lightning.sizing.trace import CHECKPOINTING

STORAGE_BITS = {"bfloat16": 16.0, "int8": 8.0, "nf4": 4.127}
"""Bits of a weight in ``base_weights``; int8's row scales add less than 0.04."""

RESERVE = 6.0
"""10^9 bytes of a device that stay free, as ``task.reserve``: a reward model (CLIP ViT-H in float32: 4), CUDA and the
allocator (2)."""

RECOMPUTED = "model.gradient_checkpointing"

_FEWEST_ROWS = 3
"""Micro-batches below this are the last resort, with all blocks recomputed: small products leave a GPU idle."""


Options = Mapping[str, Any]
"""The value of each of ``OPTIONS``, which determine a run's memory; ``family`` is null for the run's own."""

OPTIONS = (
    "family",
    "base_weights",
    "encode_on",
    RECOMPUTED,
    "model.micro_batch",
    "model.rollout_batch",
    "model.decode_batch",
)


class Latents(NamedTuple):
    """Bytes of the candidates' float32 latents on one device."""

    sampling: int  # of the stage that has most, when its last chunk is sampled
    joining: int  # for a moment after a stage, which has no activations then
    kept: int  # of the samples to train on, until the next iteration's


class Footprint(NamedTuple):
    """Bytes on one device."""

    policy: Mapping[str, int]  # by base_weights
    shadow: int  # 0 if the family has none
    others: int  # merged replica, trained weights, their gradients and moments, gathered weights, autoencoder
    text_encoders: int
    training: Mapping[bool | str, int]  # activations of a row, by gradient_checkpointing
    sampling: int  # activations of a candidate
    decoding: int  # activations of an image
    latents: Mapping[str | None, Latents]  # by the option ``family``

    def peak(self, options: Options) -> int:
        """Return the bytes of the weights and of the stage that needs most; decoding overlaps with sampling."""
        family, base_weights, encode_on, checkpointing, rows, sampled, images = (options[key] for key in OPTIONS)
        weights = self.policy[base_weights] + self.others + (self.shadow if family is None else 0)
        encoding = self.text_encoders if encode_on == "device" else 0
        latents = self.latents[family]
        rollout = max(sampled * self.sampling + images * self.decoding + latents.sampling, latents.joining)
        return weights + latents.kept + max(encoding, rows * self.training[checkpointing], rollout)

    def settled(self, options: Options, room: float) -> Options:
        """Return the options with ``auto`` replaced by the least recomputation that needs at most ``room`` bytes.

        If none does, all blocks are recomputed.
        """
        if options[RECOMPUTED] != AUTO:
            return options
        choices = [{**options, RECOMPUTED: blocks} for blocks in CHECKPOINTING]
        return next((choice for choice in choices if self.peak(choice) <= room), choices[-1])

    def explain(self, options: Options, room: float) -> str:
        """Return which recomputation ``settled`` chooses, and the peaks that it chooses by."""
        peaks = [
            f"{str(blocks).lower()} {self.peak({**options, RECOMPUTED: blocks}) / 1e9:.3g}" for blocks in CHECKPOINTING
        ]
        chosen = str(self.settled(options, room)[RECOMPUTED]).lower()
        return f"{RECOMPUTED}=auto is {chosen} here: peaks {', '.join(peaks)} GB, of {room / 1e9:.3g} free"


def fit(footprint: Footprint, most: Options, room: float) -> Options:
    """Return the first options that need at most ``room`` bytes, or those that need least if none fit.

    Order of preference: weights in BF16 or int8 with a shadow, then without, then nf4; text encoders on the device; no
    recomputation rather than a large micro-batch; large rollout batches, then large decoding batches. No batch exceeds
    the one in ``most``.
    """
    storages = [name for name in STORAGE_BITS if name in footprint.policy]
    storages = storages[storages.index(most["base_weights"]) :]
    families = [None, "prefix"] if footprint.shadow else [None]
    weights = sorted(product(families, storages), key=lambda choice: choice[1] == "nf4")  # stable
    rows, sampled, images = (halvings(most[key]) for key in OPTIONS[-3:])
    enough = [n for n in rows if n >= min(_FEWEST_ROWS, rows[0])]
    training = [*product(CHECKPOINTING, enough), *product([True], rows)]
    least, smallest = math.inf, most
    for stored, device, trained, batches in product(
        weights, ("device", "cpu"), training, list(product(sampled, images))
    ):
        options = dict(zip(OPTIONS, (*stored, device, *trained, *batches), strict=True))
        peak = footprint.peak(options)
        if peak <= room:
            return options
        if peak < least:
            least, smallest = peak, options
    return smallest


def halvings(number: int) -> list[int]:
    """Return ``number``, its half rounded down, and so on to 1."""
    return [number >> shift for shift in range(number.bit_length())]


def overrides(options: Options, most: Options) -> list[str]:
    """Return the command-line arguments that change ``most`` into ``options``."""
    return [f"{key}={str(value).lower()}" for key, value in options.items() if value != most[key]]


# Latents


def latent_bytes(stages: Sequence[Stage], pool: int, keep: int, transitions: int, one: int) -> Latents:
    """Return the bytes of all candidates' latents in an iteration, if one candidate's are ``one``.

    The last stage, and one that the next continues, hold x and x0 of each candidate, which are one tensor at the end of
    a trajectory without noise, and the path of ``transitions`` recorded steps. They join the chunks of each into a new
    tensor. The kept candidates that a stage continues stay until its end. Other stages hold scores only.
    """
    path = transitions + 1 if transitions else 0
    sampling = joining = resumed = 0
    for (stage, following), count in zip(with_next(stages), candidates_per_prompt(stages, pool), strict=True):
        before, resumed = resumed * count, 0
        if following is None or stage.continues_in(following):
            recorded = path if following is None else 0
            resumed = recorded + (1 if stage.stop_after is None and not recorded else 2)
            joining = max(joining, before + count * (resumed + 2 + recorded))
        sampling = max(sampling, before + count * resumed)
    return Latents(sampling * one, joining * one, keep * (1 + path) * one)


# Weights


def bytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers."""
    return sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))


def separate_bytes(modules: Iterable[nn.Module], shared: Iterable[Tensor]) -> int:
    """Return the bytes of the parameters of several modules, each once and without the ``shared`` ones."""
    tensors = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return sum(tensors[key].nbytes for key in tensors.keys() - {id(parameter) for parameter in shared})


def gathered_bytes(transformer: nn.Module, blocks: Sequence[nn.Module], with_gradients: bool) -> int:
    """Return the bytes that a rank of trainer=fsdp holds of whole weights: those outside of the blocks, a block and the
    next one.

    ``with_gradients``: of these weights, too, and for a block their float32 copies that are reduced.
    """
    largest = max(blocks, key=bytes_of)
    weights = bytes_of(transformer) - sum(map(bytes_of, blocks)) + 2 * bytes_of(largest)
    return weights + with_gradients * (weights + 4 * sum(weight.numel() for weight in largest.parameters()))


def replica_bytes(
    weights: Mapping[str, Tensor], replaced: Collection[str], quantized: Collection[str] = (), bits: float = 16
) -> int:
    """Return the bytes of the ``weights`` that a replica owns: quantised ones at ``bits``, and others it replaces."""
    packed = sum(weights[name].numel() for name in quantized) * bits / 8
    return math.ceil(packed) + sum(weights[name].nbytes for name in replaced if name not in quantized)


def stored_bytes(whole: int, layers: Iterable[nn.Linear]) -> dict[str, int]:
    """Return the bytes of a transformer of ``whole`` bytes whose frozen ``layers`` are stored, by ``base_weights``."""
    weights = [layer.weight for layer in layers]
    others, stored = whole - sum(weight.nbytes for weight in weights), sum(weight.numel() for weight in weights)
    return {name: others + math.ceil(stored * bits / 8) for name, bits in STORAGE_BITS.items()} | {"bfloat16": whole}


def encoder_bytes(architecture: Architecture, dtypes: Mapping[str, torch.dtype]) -> int:
    """Return the bytes of the text encoders in their dtypes."""
    parts = {name: part for name, part in architecture.components.items() if name.startswith("text_encoder")}
    total = 0
    for name, part in parts.items():
        with reading(f"model.pretrained={architecture.name} is invalid: its {name}"):
            total += bytes_of(build_component(part, "meta", dtypes.get(name, dtypes["default"])))
    return total
