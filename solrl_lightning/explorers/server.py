"""The explorer: samples and scores chunks of candidates for runs, with the weights that they push.

Imported by task=explore only, because fastapi and uvicorn are optional dependencies.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request, Response
from safetensors import SafetensorError

from solrl_lightning.errors import NonFiniteError, ServerError, UserError
from solrl_lightning.explorers import messages
from solrl_lightning.explorers.messages import Answer
from solrl_lightning.names import OLD
from solrl_lightning.policies.lora import State
from solrl_lightning.rewards.server import read_body
from solrl_lightning.rollout.chunks import score_images
from solrl_lightning.rollout.scoring_worker import Submit
from solrl_lightning.sampling.state import concatenate, map_tensors
from solrl_lightning.training.module import SolRLModule

KEPT_WEIGHTS = 2
"""Versions that an explorer holds: chunks of the version before may still arrive."""
_MAX_BYTES = 2**32  # of a request


class UnknownWeights(LookupError):
    """Weights that this process has not got, or not kept."""


class Explorer:
    """Answers requests with its own module.

    Args:
        module: its samplers and rewards; the weights of its adapters do not matter.
    """

    def __init__(self, module: SolRLModule) -> None:
        self.module = module
        self._weights: OrderedDict[str, State] = OrderedDict()
        self._synchronised: dict[str, str] = {}  # identity of the weights of each sampler

    def take_weights(self, identity: str, message: bytes) -> None:
        """Keep adapter weights; raises ``UserError`` unless they fit the model."""
        state = messages.unpack(message)[1]
        expected = {name: value.shape for name, value in self.module.policy_state(OLD).items()}
        if {name: value.shape for name, value in state.items()} != expected:
            raise UserError("the adapters do not fit: model, model.lora and this package must be those of the run")
        self._weights[identity] = {name: value.to(self.module.policy.device) for name, value in state.items()}
        while len(self._weights) > KEPT_WEIGHTS:
            self._weights.popitem(last=False)

    @torch.no_grad()
    def sample(self, message: bytes) -> Callable[[], Answer]:
        """Sample the chunk of a request; return what scores it.

        Raises:
            UnknownWeights: the run must push the weights first.
        """
        module, device = self.module, self.module.policy.device
        if device.type == "cuda":  # this thread's current device is the first one
            torch.cuda.set_device(device)
        weights, request = messages.unpack_request(message, device)
        if weights not in self._weights:
            raise UnknownWeights(weights)
        sampler, spec = module.transformers.samplers[request.sampler], request.spec
        if self._synchronised.get(request.sampler) != weights:
            sampler.sync(self._weights[weights], None)
            self._synchronised[request.sampler] = weights
        prompts = request.prompts.gather(request.owner)
        if spec.initial_state is not None:
            spec = spec._replace(initial_state=map_tensors(lambda tensor: tensor[:, None], spec.initial_state))
        states = [chunk.state for chunk in sampler.sample(prompts, request.seeds[:, None], spec)]
        state: Any = concatenate(states)
        decode = module.decoder(str(spec.decoder))
        rewards = module.rewards.for_training

        @torch.no_grad()
        def answer() -> Answer:
            scores = score_images(decode, rewards, state.x0, prompts.prompts, request.seeds, or_nan=True)
            return Answer(scores, state if spec.with_states else None)

        return answer


def create_app(explorer: Explorer, submit: Submit[Answer], facts: dict[str, Any], token: str) -> FastAPI:
    """The application; all requests need ``token`` unless it is empty.

    ``GET /health`` answers with the ``facts`` that a run must have in common.
    ``PUT /weights/<identity>`` takes adapter weights, ``POST /sample`` a chunk, which is sampled while the one before
    is scored; both are messages. The status is 409 if the weights of a chunk must be pushed first.
    """
    app = FastAPI(openapi_url=None)
    turn = asyncio.Lock()

    @app.get("/health")
    async def health(request: Request) -> dict[str, Any]:
        await read_body(request, token, 0)
        return facts

    @app.put("/weights/{identity}")
    async def weights(identity: str, request: Request) -> None:
        body = await read_body(request, token, _MAX_BYTES)
        try:
            async with turn:
                await asyncio.to_thread(explorer.take_weights, identity, body)
        except (SafetensorError, KeyError, ValueError) as error:
            raise HTTPException(422, str(error)) from error

    @app.post("/sample")
    async def sample(request: Request) -> Response:
        body = await read_body(request, token, _MAX_BYTES)
        try:
            async with turn:
                future = await asyncio.to_thread(lambda: submit(explorer.sample(body)))
            answer = await asyncio.to_thread(lambda: messages.pack_answer(future.result()))
        except UnknownWeights as error:
            raise HTTPException(409, "push the weights first") from error
        except ServerError as error:  # of a reward that is a server, too
            raise HTTPException(503, str(error)) from error
        except (NonFiniteError, SafetensorError, KeyError, ValueError) as error:
            raise HTTPException(422, str(error)) from error
        return Response(answer, media_type="application/octet-stream")

    return app
