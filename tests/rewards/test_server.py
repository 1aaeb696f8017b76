"""The server of task=serve, with reward=http over a socket."""

import base64
import io
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image
from torch import Tensor
from urllib3 import request

from solrl_lightning.errors import NonFiniteError, ServerError, UserError
from solrl_lightning.rewards.addresses import TOKEN
from solrl_lightning.rewards.base import Metadata, Reward
from solrl_lightning.rewards.http import HTTPReward, to_png
from solrl_lightning.rewards.server import create_app, decode
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.shapes.world import eval_captions


class Count(Reward):
    """The metadata's count; NaN for -1, and an exception for -2."""

    name = "count"

    def check_prompts(self, prompts: list[str], metadata: list[Metadata]) -> None:
        if missing := [prompt for prompt, row in zip(prompts, metadata, strict=True) if "count" not in row]:
            raise UserError(f"the prompt {missing[0]!r} has no count")

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        counts = torch.tensor([float(row["count"]) for row in metadata])
        if (counts == -2).any():
            raise RuntimeError("out of order")
        return torch.where(counts == -1, torch.nan, counts)


@contextmanager
def serving(rewards: WeightedRewards, token: str = "", **limits: int) -> Iterator[str]:
    app = create_app(rewards, torch.device("cpu"), token, **({"max_images": 8, "max_pixels": 32 * 32} | limits))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, log_level="critical"))
    listener = server.config.bind_socket()
    thread = Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


SHAPES, COUNT = ShapesReward(), Count()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(WeightedRewards({"shapes": SHAPES, "count": COUNT}, {"shapes": 0.5, "count": 2.0})) as address:
        yield address


def client(url: str, **options: Any) -> HTTPReward:
    return HTTPReward(f"{url}/score", **({"retries": 0, "backoff": 0} | options))


IMAGES = torch.randint(256, (11, 3, 32, 32), generator=torch.Generator().manual_seed(0)) / 255
CAPTIONS = eval_captions()[:11]


def test_scores_are_those_of_the_rewards_on_8_bit_images(url: str) -> None:
    metadata: list[Metadata] = [{"count": number} for number in range(11)]
    expected = 0.5 * SHAPES(IMAGES, CAPTIONS) + 2.0 * COUNT(IMAGES, CAPTIONS, metadata)
    scores = client(url, batch=4)(IMAGES, CAPTIONS, metadata)
    assert torch.equal(scores, expected) and scores.unique().numel() == 11


@pytest.mark.parametrize(
    ("options", "prompts", "rows", "message"),
    [
        ({"batch": 9}, CAPTIONS[:9], {"count": 1}, "status 422: .*must have 1 to 8 images, .* got 9"),
        ({}, ["a cat"], {"count": 1}, "status 422: .*a cat"),
        (
            {},
            CAPTIONS[:1],
            {"count": -2},
            "status 500: .*the reward count raises RuntimeError in .*out of order. It was asked",
        ),
    ],
)
def test_errors_reach_the_run_with_their_reason(
    url: str, options: dict[str, Any], prompts: list[str], rows: Metadata, message: str
) -> None:
    with pytest.raises(ServerError, match=message):
        client(url, **options)(IMAGES[: len(prompts)], prompts, [rows] * len(prompts))
    health = request("GET", f"{url}/health")
    assert (health.status, health.json()) == (200, {"status": "ok", "reward": "weighted_sum"})


def test_an_image_without_a_score_gets_null(url: str) -> None:
    metadata: list[Metadata] = [{"count": number} for number in (1, -1, 3)]
    images = [base64.b64encode(to_png((image * 255).byte().permute(1, 2, 0))).decode() for image in IMAGES[:3]]
    answer = request("POST", f"{url}/score", json={"images": images, "prompts": CAPTIONS[:3], "metadata": metadata})
    first, none, last = answer.json()["scores"]
    assert none is None and math.isfinite(first) and math.isfinite(last)
    with pytest.raises(NonFiniteError):
        client(url)(IMAGES[:3], CAPTIONS[:3], metadata)


def test_image_with_too_many_pixels_is_an_error_before_it_is_decoded(url: str) -> None:
    with pytest.raises(ServerError, match="status 422: .*at most 1024 pixels; got 33 x 32"):
        client(url)(torch.zeros(1, 3, 32, 33), CAPTIONS[:1], [{"count": 1}])


def encoded(*sides: int) -> list[str]:
    images = [torch.zeros(side, side, 3, dtype=torch.uint8) for side in sides]
    return [base64.b64encode(to_png(image)).decode() for image in images]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"hello", 422, "the body is invalid: Invalid JSON"),
        (b'{"images": ["aaaa"]}', 422, "prompts is invalid: Field required"),
        ({"images": [encoded(32)[0][:60]], "prompts": ["a"]}, 422, "an image must be a PNG file"),
        ({"images": encoded(8, 9), "prompts": ["a", "b"]}, 422, "size of at most 1024 pixels; got 8 x 8, 9 x 9"),
        ({"images": encoded(8), "prompts": ["a", "b"]}, 422, "metadata if there are any; got 1 and 2"),
        ({"images": [], "prompts": []}, 422, "metadata if there are any; got 0 and 0"),
        (b" " * (8 * 32 * 32 * 4 + 2**20 + 1), 413, "a request must have at most 1081344 bytes"),
    ],
)
def test_malformed_request_is_an_error(url: str, body: Any, status: int, message: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = request("POST", f"{url}/score", body=data, retries=False)
    assert answer.status == status and message in answer.json()["detail"] and len(answer.data) < 300


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_pictures_of_all_modes_of_png_keep_their_levels(mode: str) -> None:
    levels = np.array([[0, 255], [255, 0]] if mode == "1" else [[0, 19], [128, 255]], np.uint8)
    grey, file = Image.fromarray(levels), io.BytesIO()
    picture = Image.fromarray(levels.astype(np.uint16) * 257) if mode == "I;16" else grey.convert(mode)
    picture.save(file, "PNG")
    images = {"images": [base64.b64encode(file.getvalue()).decode()], "prompts": ["a"]}
    decoded, _ = decode(json.dumps(images).encode(), 1, 4)
    assert picture.mode == mode and (decoded[0] * 255).round().byte().tolist() == [levels.tolist()] * 3


def test_path_in_a_request_is_not_opened() -> None:
    class Seen(Count):
        def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
            return torch.tensor([float(len(row)) for row in metadata])

    with serving(WeightedRewards({"seen": Seen()}, {"seen": 1.0})) as url:
        row = {"count": 1, "image": "a.png", "input_image": "/etc/hostname"}
        assert client(url)(torch.zeros(1, 3, 8, 8), ["a"], [row]).tolist() == [2.0]


def test_token_is_required_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(WeightedRewards({"count": COUNT}, {"count": 1.0}), token="s3cret") as url:

        def score() -> list[float]:
            return client(url)(torch.zeros(1, 3, 8, 8), ["a"], [{"count": 3}]).tolist()

        for wrong in ("", "s3cre", "s3cretx"):
            monkeypatch.setenv(TOKEN, wrong)
            with pytest.raises(ServerError, match="status 401: .*the token is missing or wrong"):
                score()
        monkeypatch.setenv(TOKEN, "s3cret")
        assert score() == [3.0]
        assert request("GET", f"{url}/health").status == 200


def test_limit_below_the_batch_is_found_before_a_model_is_loaded() -> None:
    with serving(WeightedRewards({"shapes": SHAPES}, {"shapes": 1.0}), max_images=3, max_pixels=64 * 64) as address:
        grey = torch.full((3, 32, 32), 0.5)
        client(address, batch=3).try_out(grey, CAPTIONS[0], {})
        with pytest.raises(
            UserError, match=r"have 1 to 3 images, .* got 4.* if 4 images of 32 x 32 .* set reward.http.batch"
        ):
            client(address, batch=4).try_out(grey, CAPTIONS[0], {})
