"""Messages between a run and its explorers: safetensors with a JSON header as one more tensor, so no code travels.

Shapes: B chunk, P prompts of the chunk.
"""

import hashlib
import json
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.rollout.chunks import SamplingSpec
from solrl_lightning.rollout.records import EncodedPrompts
from solrl_lightning.sampling import SolverState

_HEADER = "header"
_CONDITIONING = "conditioning."
_NOT_IN_HEADER = ("sigmas", "initial_state", "transitions")  # tensors, and what exploration has none of
Tensors = dict[str, Tensor]


class Request(NamedTuple):
    """A chunk of candidates to sample and to score."""

    sampler: str  # one of names.Sampler
    prompts: EncodedPrompts  # the P prompts of the chunk
    owner: Tensor  # int64 [B], the prompt of each candidate
    seeds: Tensor  # int64 [B]
    spec: SamplingSpec  # its state is [B, ...]


class Answer(NamedTuple):
    """The sampled and scored candidates of a request."""

    scores: Tensor  # float32 [B, R]
    state: SolverState | None  # [B, ...]; None if the request is without states


def pack(header: dict[str, Any], tensors: Tensors) -> bytes:
    """Return a message."""
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    return save({_HEADER: text} | {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def unpack(message: bytes) -> tuple[dict[str, Any], Tensors]:
    """Return the header and the tensors of a message; raises ``ValueError``, ``KeyError`` or ``SafetensorError``."""
    tensors = load(message)
    return json.loads(tensors.pop(_HEADER).numpy().tobytes()), tensors


def pack_weights(state: Tensors) -> tuple[str, bytes]:
    """Return the identity of adapter weights, a digest of what they are, and the message that carries them."""
    message = pack({}, state)
    return hashlib.sha256(message).hexdigest(), message


def _pack_state(state: SolverState) -> tuple[dict[str, Any], Tensors]:
    tensors = {"x": state.x, "x0": state.x0}
    if state.finished:
        del tensors["x"]  # the tensor x0
    header = {"step": state.step, "finished": state.finished}
    return header, {f"state.{name}": tensor for name, tensor in tensors.items() if tensor is not None}


def _unpack_state(header: dict[str, Any], tensors: Tensors) -> SolverState:
    x0 = tensors.get("state.x0")
    x = x0 if header["finished"] else tensors["state.x"]
    assert x is not None
    return SolverState(x, x0, header["step"], finished=header["finished"])


def pack_request(request: Request, weights: str) -> bytes:
    """Return the message that asks for ``request`` with the weights of an identity."""
    spec, prompts = request.spec, request.prompts
    conditioning = {f"{_CONDITIONING}{name}": value for name, value in prompts.conditioning.items()}
    header: dict[str, Any] = {
        "weights": weights,
        "sampler": request.sampler,
        "prompts": [vars(prompt) for prompt in prompts.prompts],
        "spec": {name: value for name, value in spec._asdict().items() if name not in _NOT_IN_HEADER},
    }
    tensors = {"owner": request.owner, "seeds": request.seeds, "sigmas": spec.sigmas} | conditioning
    if spec.initial_state is not None:
        header["state"], state = _pack_state(spec.initial_state)
        tensors |= state
    return pack(header, tensors)


def unpack_request(message: bytes, device: torch.device) -> tuple[str, Request]:
    """Return the identity of the weights and the request of a message, on ``device`` but for what is read there."""
    header, tensors = unpack(message)
    owner, seeds, sigmas = tensors.pop("owner"), tensors.pop("seeds"), tensors.pop("sigmas")
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    conditioning = {n.removeprefix(_CONDITIONING): v for n, v in tensors.items() if n.startswith(_CONDITIONING)}
    state = _unpack_state(header["state"], tensors) if "state" in header else None
    spec = SamplingSpec(sigmas=sigmas, initial_state=state, **header["spec"])
    prompts = EncodedPrompts([Prompt(**row) for row in header["prompts"]], conditioning)
    return header["weights"], Request(header["sampler"], prompts, owner, seeds, spec)


def pack_answer(answer: Answer) -> bytes:
    """Return the message with the ``answer``."""
    header, tensors = ({}, {}) if answer.state is None else _pack_state(answer.state)
    return pack(header, {"scores": answer.scores} | tensors)


def unpack_answer(message: bytes, device: torch.device) -> Answer:
    """Return the answer of a message, on ``device``."""
    header, tensors = unpack(message)
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return Answer(tensors["scores"], _unpack_state(header, tensors) if header else None)
