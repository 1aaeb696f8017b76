"""Server that scores batches of images in the format of docs/rewards/http.md.

Imported by task=serve only, because fastapi and uvicorn are optional dependencies.
"""

import asyncio
import hmac
import io
import logging
import math
import signal
import socket
from contextlib import suppress
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from PIL import Image
from pydantic import Base64Bytes, BaseModel, ValidationError
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from solrl_lightning.artifacts.complete import reading
from solrl_lightning.data.input_images import as_rgb, highest_level
from solrl_lightning.data.prompt import INPUT_IMAGE, Prompt
from solrl_lightning.errors import RewardError, RewardOutOfMemory, UserError, sentence
from solrl_lightning.rewards.weighted import WeightedRewards

log = logging.getLogger(__name__)

_BYTES_PER_PIXEL = 4  # of a PNG file with three channels in base64, at most
_TEXT_BYTES = 2**20  # of prompts and metadata, at most


class Batch(BaseModel):
    """A request."""

    images: list[Base64Bytes]
    prompts: list[str]
    metadata: list[dict[str, Any]] | None = None


def create_app(rewards: WeightedRewards, device: torch.device, token: str, max_images: int, max_pixels: int) -> FastAPI:
    """Make the application: GET /health and POST /score, which requires ``token`` unless it is empty.

    Requests are scored one after another. The answer is an error for another format, too many or too large images, and
    prompts that a reward cannot score. A reward that fails is logged, too.
    """
    app = FastAPI(openapi_url=None)
    turn = asyncio.Lock()
    max_bytes = max_images * max_pixels * _BYTES_PER_PIXEL + _TEXT_BYTES

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "reward": rewards.name}

    @app.post("/score")
    async def score(request: Request) -> dict[str, list[float | None]]:
        body = await read_body(request, token, max_bytes)
        try:
            images, batch = await asyncio.to_thread(decode, body, max_images, max_pixels)
            async with turn:
                scores = await asyncio.to_thread(score_batch, rewards, images.to(device), batch)
        except UserError as error:
            raise HTTPException(422, str(error)) from error
        except (RewardError, RewardOutOfMemory) as error:
            others = f" and {len(batch.prompts) - 1} more" if len(batch.prompts) > 1 else ""
            line = f"{sentence(error)} It was asked about the prompt {batch.prompts[0]!r}{others}."
            log.error("%s", line)
            raise HTTPException(500, line) from error
        return {"scores": [score if math.isfinite(score) else None for score in scores.tolist()]}

    return app


async def read_body(request: Request, token: str, max_bytes: int) -> bytes:
    """Return the body of a request."""
    authorization = request.headers.get("authorization", "")
    if token and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise HTTPException(401, "the token is missing or wrong")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise HTTPException(413, f"a request must have at most {max_bytes} bytes")
    return bytes(body)


def decode(body: bytes, max_images: int, max_pixels: int) -> tuple[Tensor, Batch]:
    """Return images [B, 3, H, W] in [0, 1] of a request, and the request. Raises ``UserError`` for an invalid one."""
    try:
        batch = Batch.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise UserError(f"{place} is invalid: {first['msg']}") from error
    counts = [len(rows) for rows in (batch.images, batch.prompts, batch.metadata) if rows is not None]
    if len({*counts}) > 1 or not 1 <= counts[0] <= max_images:
        raise UserError(
            f"a request must have 1 to {max_images} images, and as many prompts, and metadata if there are any; got "
            f"{' and '.join(map(str, counts))}"
        )
    return pixels(batch.images, max_pixels).float() / 255, batch


def pixels(files: list[bytes], max_pixels: int) -> Tensor:
    """Decode PNG files to uint8 [B, 3, H, W]. UserError for damaged files, several sizes and large ones."""
    with reading("an image must be a PNG file"):
        images = [Image.open(io.BytesIO(png), formats=["PNG"]) for png in files]  # reads the headers only
        sizes = {image.size for image in images}
        if len(sizes) == 1 and math.prod(images[0].size) <= max_pixels:
            return torch.stack([pil_to_tensor(as_rgb(image, highest_level(image))) for image in images])
    got = ", ".join(f"{width} x {height}" for width, height in sorted(sizes))
    raise UserError(f"the images of a request must be of one size of at most {max_pixels} pixels; got {got}")


def score_batch(rewards: WeightedRewards, images: Tensor, batch: Batch) -> Tensor:
    """Return the weighted sums, float32 [B], NaN of an image that a reward does not score.

    Raises as ``Reward.check_prompts`` does and, but for NonFiniteError, as ``Reward.__call__``.
    """
    prompts = [  # a path in a request opens no file here
        Prompt(text, {key: value for key, value in row.items() if key != INPUT_IMAGE})
        for text, row in zip(batch.prompts, batch.metadata or [{} for _ in batch.prompts], strict=True)
    ]
    rewards.check_prompts(prompts)
    return rewards.total(rewards.of_each(images, prompts)[0])


class Server(uvicorn.Server):
    """Prints ``announcement`` when it listens."""

    def __init__(self, app: FastAPI, announcement: str) -> None:
        super().__init__(
            uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, timeout_keep_alive=75)
        )
        self.announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.announcement, flush=True)

    def run_until_signal(self, listener: socket.socket) -> None:
        """Answer requests until SIGINT or SIGTERM, which wait for the requests in work."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises again the signal that ended it
        with suppress(KeyboardInterrupt):
            self.run(sockets=[listener])
