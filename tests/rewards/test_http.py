"""reward=http against servers that answer, fail, hang and die; and the examples of docs/rewards/http.md."""

import gzip
import io
import json
import logging
import re
import threading
import time
import tracemalloc
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from PIL import Image
from reward_servers import free_port, in_thread, started
from torch import Tensor
from urllib3 import HTTPResponse

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import NonFiniteError, ServerError, UserError
from solrl_lightning.machine import interrupts
from solrl_lightning.rewards import client
from solrl_lightning.rewards.addresses import TOKEN
from solrl_lightning.rewards.http import HTTPReward
from solrl_lightning.rewards.weighted import WeightedRewards

PROMPTS = ["a cat", "zwölf Käuze", 'a "dog"', "a fish", "a cat"]
METADATA = [{"count": 1}, {}, {"include": [{"class": "dog"}]}, {"tag": "x"}, {"count": 1}]
IMAGES = torch.rand(5, 3, 6, 8, generator=torch.Generator().manual_seed(0))


class Reply(NamedTuple):
    parts: Sequence[bytes]
    status: int = 200
    seconds: float = 0  # before each part
    encoding: str = "identity"
    missing: int = 0  # bytes announced and not sent
    retry_after: str | None = None


def reply(body: Any, status: int = 200, seconds: float = 0) -> Reply:
    return Reply([(body if isinstance(body, str) else json.dumps({"scores": body})).encode()], status, seconds)


ONES = reply([1] * 5)
BUSY = reply("busy", 503)
LATE = reply("late", seconds=1.0)  # with a time-out of 0.5 s


class Server(BaseHTTPRequestHandler):
    """Answers a request with the next of ``replies``, the last of them again and again."""

    url: str
    replies: list[Reply]
    requests: list[dict[str, Any]]
    headers_seen: list[Any]
    sent: int  # parts
    before_reply: Callable[[], object]

    @classmethod
    def will_reply(cls, *replies: Reply) -> None:
        cls.replies = list(replies)

    @classmethod
    def reward(cls, **options: Any) -> HTTPReward:
        return HTTPReward(cls.url, **({"batch": 5, "retries": 1, "backoff": 0, "timeout": 5} | options))

    def do_POST(self) -> None:
        cls = type(self)
        cls.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        cls.headers_seen.append(self.headers)
        answer = cls.replies.pop(0) if len(cls.replies) > 1 else cls.replies[0]
        parts, status, seconds, encoding, missing, retry_after = answer
        cls.before_reply()
        self.send_response(status)
        self.send_header("Content-Length", str(sum(map(len, parts)) + missing))
        self.send_header("Content-Encoding", encoding)
        self.send_header("Location", "/elsewhere")
        if retry_after:
            self.send_header("Retry-After", retry_after)
        with suppress(ConnectionError):  # the client has closed it
            for number, part in enumerate(parts):
                time.sleep(seconds)
                if number == 0:
                    self.end_headers()
                self.wfile.write(part)
                cls.sent += 1

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[type[Server]]:
    state = {"requests": [], "headers_seen": [], "sent": 0, "before_reply": lambda: None}
    scripted = type("Scripted", (Server,), state)
    with in_thread(scripted) as scripted.url:
        yield scripted


def decoded(png: str) -> Tensor:
    picture = Image.open(io.BytesIO(b64decode(png)), formats=["PNG"])
    assert picture.mode == "RGB"
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)


def test_every_request_has_the_images_prompts_and_metadata_of_its_rows(server: type[Server]) -> None:
    server.will_reply(reply([1, 2.5]), reply([-3, 0]), reply('{"scores": [1e-3]}'))
    scores = server.reward(batch=2, concurrency=1)(IMAGES, PROMPTS, METADATA)
    assert scores.dtype == torch.float32 and scores.tolist() == torch.tensor([1, 2.5, -3, 0, 1e-3]).tolist()
    for first, request in zip((0, 2, 4), server.requests, strict=True):
        rows = slice(first, first + 2)
        assert (request["prompts"], request["metadata"]) == (PROMPTS[rows], METADATA[rows]) and len(request) == 3
        images = torch.stack([decoded(png) for png in request["images"]])
        assert torch.equal(images, (IMAGES[rows] * 255).round().byte().permute(0, 2, 3, 1))


def test_example_server_scores_batches_in_order() -> None:
    flat = torch.zeros(5, 3, 6, 8)
    flat[1], flat[3] = IMAGES[0], IMAGES[1]  # noise takes more bytes than black
    with started("example_server.py", free_port()) as url:
        for batch in (1, 2, 5):
            reward = HTTPReward(url, batch=batch, retries=8, backoff=0.05)
            scores = reward(flat, PROMPTS)
            assert scores[0] == scores[2] == scores[4] < 0.1 < scores[1].minimum(scores[3])


def test_a_run_that_is_to_end_waits_for_no_server(server: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "ENDING", threading.Event())
    server.before_reply = interrupts.ENDING.set
    for answer in (BUSY, BUSY._replace(retry_after="1")):
        server.will_reply(answer)
        with pytest.raises(SIGTERMException):
            server.reward()(IMAGES, PROMPTS)
    assert len(server.requests) == 2


def test_a_run_that_is_to_end_waits_for_no_server_that_hangs(
    server: type[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PATIENCE", 1)
    monkeypatch.setattr(interrupts, "ENDING", threading.Event())
    left = threading.Event()
    server.before_reply = lambda: (interrupts.ENDING.set(), left.wait(30))
    server.will_reply(ONES)
    with pytest.raises(SIGTERMException):
        server.reward(timeout=60)(IMAGES, PROMPTS)
    left.set()
    server.before_reply = lambda: None
    assert server.reward()(IMAGES, PROMPTS).tolist() == [1] * 5  # an answer that comes is still waited for


def test_requests_run_at_the_same_time_up_to_the_concurrency(server: type[Server]) -> None:
    meeting, running, counts = threading.Barrier(3), [], []  # of the first three; the last two would wait in vain

    def before_reply() -> None:
        running.append(None)
        if len(server.requests) <= 3:
            meeting.wait(30)
        counts.append(len(running))
        time.sleep(0.05)
        running.pop()

    server.before_reply = before_reply
    server.will_reply(reply([1]))
    assert server.reward(batch=1, concurrency=3)(IMAGES, PROMPTS).tolist() == [1] * 5
    assert max(counts) == 3


@pytest.mark.parametrize(
    ("failure", "retries"),
    [
        (reply("busy", 429), 2),
        (reply("late", 408), 2),
        (reply("unreachable", 522), 2),  # of Cloudflare
        (reply("busy", 500), 2),
        (BUSY, 2),
        (LATE, 1),
        (Reply([b'{"scores": [1, 2,'], missing=9), 1),
        (Reply([]), 2),  # the connection ends without an answer, as of a killed server
    ],
)
def test_failed_request_is_sent_again(server: type[Server], failure: Reply, retries: int) -> None:
    server.will_reply(*[failure] * retries, ONES)
    assert server.reward(retries=retries, timeout=0.5)(IMAGES, PROMPTS).tolist() == [1] * 5
    first, *others = server.requests
    assert others == [first] * retries


@pytest.mark.parametrize(
    ("answer", "requests", "message"),
    [
        (BUSY, 2, "answered with status 503: busy"),
        (LATE, 2, "does not answer: .*Read timed out"),
        (Reply([b" "] * 100, seconds=0.02), 2, "does not answer: .*no end after"),  # each byte comes in time
        (reply("wrong", 401), 1, f"answered with status 401: wrong. Set its token with export {TOKEN}=<token>."),
        (reply("", 302), 1, r"answered with status 302 \(Location: /elsewhere\)"),
        (reply("<html>\n\nhi"), 1, r'invalid answer: .* be {"scores": \[...\]} with 5 numbers; got <html> hi'),
        (reply('{"score": 1}'), 1, 'invalid answer: .*got {"score": 1}'),
        (reply([1, 2, 3, 4, True]), 1, "invalid answer"),
        (reply([1, 2, 3, 4, 10**400]), 1, "invalid answer"),  # no float
        (reply({"0": 5, "1": 4, "2": 3, "3": 2, "4": 1}), 1, "invalid answer"),  # of pandas
        (reply('{"scores": "12345"}'), 1, "invalid answer: .* with 5 numbers; got .*12345"),
        (reply("[" * 100_000), 1, r"invalid answer: .* with 5 numbers; got \[\["),
    ],
)
def test_error_names_the_server_and_the_sample(
    server: type[Server], answer: Reply, requests: int, message: str
) -> None:
    server.will_reply(answer)
    where = re.escape(f"the reward server {server.url}, asked about the prompt 'a cat' and 4 more, ")
    with pytest.raises(ServerError, match=f"^{where}.*{message}"):
        server.reward(timeout=0.5)(IMAGES, PROMPTS)
    assert len(server.requests) == requests


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_long_answer_is_read_up_to_a_limit(server: type[Server], encoding: str) -> None:
    """32 MB, compressed to less than one."""
    parts = [b'{"scores": [', *[b"1, " * 333_333] * 32]
    parts = [gzip.compress(b"".join(parts), 1)] if encoding == "gzip" else parts
    server.will_reply(Reply(parts, encoding=encoding))
    tracemalloc.start()
    with pytest.raises(ServerError, match=r"invalid answer: .* at most 16777216 bytes and .* got .*\[1, 1, "):
        server.reward(retries=0)(IMAGES, PROMPTS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (server.sent < 32 or encoding == "gzip") and peak < 50e6


def test_compressed_answer_is_read(server: type[Server]) -> None:
    server.will_reply(Reply([gzip.compress(ONES.parts[0])], encoding="gzip"))
    assert server.reward()(IMAGES, PROMPTS).tolist() == [1] * 5


def test_outage_is_logged_in_one_line(server: type[Server], caplog: pytest.LogCaptureFixture) -> None:
    reward = server.reward(retries=3)
    for replies in ((BUSY, BUSY, ONES), (BUSY, ONES)):  # two outages
        server.will_reply(*replies)
        reward(IMAGES, PROMPTS)
    line = f"{server.url}: it answered with status 503. Each request is sent again, up to 3 times."
    assert caplog.messages == [line]  # of a minute
    reward._client._logged -= 61
    server.will_reply(BUSY, ONES)
    reward(IMAGES, PROMPTS)
    assert caplog.messages == [line, line]
    server.will_reply(LATE, ONES)
    server.reward(timeout=0.5)(IMAGES, PROMPTS)
    assert len(caplog.messages) == 3 and "Read timed out" in caplog.messages[2]


@pytest.mark.parametrize("value", ["NaN", "null", "Infinity"])
def test_error_about_a_score_that_is_not_finite_names_the_server_and_the_sample(
    server: type[Server], value: str
) -> None:
    server.will_reply(reply([1]), reply(f'{{"scores": [{value}]}}'), reply([1]))
    with pytest.raises(NonFiniteError, match=f"http of {server.url} is (nan|inf) .*'zwölf Käuze'") as error:
        server.reward(batch=1, concurrency=1)(IMAGES, PROMPTS)
    assert error.value.row == 1


def test_a_null_leads_to_no_more_requests(server: type[Server]) -> None:
    server.will_reply(reply([1]), reply('{"scores": [null]}'), reply([1]))
    rewards = WeightedRewards({"http": server.reward(batch=1, concurrency=1)}, {"http": 1.0})
    scores, error = rewards.of_each(IMAGES[:3], [Prompt(prompt) for prompt in PROMPTS[:3]])
    assert len(server.headers_seen) == 3 and error is not None and error.row == 1
    assert scores.nan_to_num(-1).tolist() == [[1], [-1], [1]]


def test_token_is_sent_and_in_no_message(
    server: type[Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN, "s3cret\n")
    server.will_reply(BUSY)
    with caplog.at_level(logging.DEBUG), pytest.raises(ServerError) as error:
        server.reward()(IMAGES, PROMPTS)
    assert server.headers_seen[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in caplog.text + str(error.value)
    monkeypatch.setenv(TOKEN, "s3\u00e9cret")
    with pytest.raises(UserError, match=f"^((?!cret).)*{TOKEN}((?!cret).)*$"):
        server.reward()


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host/score", "http://", "http://me:s3cret@host/score", "http://[::1/", None]
)
def test_url_that_is_no_address_or_has_a_password_is_an_error(url: Any) -> None:
    message = "^url=.* is invalid: it must begin with http:// or https://"
    with pytest.raises(UserError, match=message) as error:
        HTTPReward(url)
    assert "s3cret" not in str(error.value)


def test_server_is_requested_once_before_a_model_is_loaded(server: type[Server]) -> None:
    server.will_reply(reply('{"scores": [null, 1]}'))
    server.reward(batch=2).try_out(torch.full((3, 40, 48), 0.5), "a cat", {"tag": "one"})
    (request,) = server.requests
    assert (request["prompts"], request["metadata"]) == (["a cat"] * 2, [{"tag": "one"}] * 2)
    assert [decoded(png).shape for png in request["images"]] == [(40, 48, 3)] * 2
    assert all(len(png) > 40 * 48 * 3 * 4 / 3 for png in request["images"])  # as long as a picture can be
    server.will_reply(BUSY)
    message = f"reward.http.url={server.url} is invalid: .* status 503: busy\\. Start or correct"
    with pytest.raises(UserError, match=message):
        server.reward(retries=5).try_out(torch.zeros(3, 4, 4), "a cat", {})
    assert len(server.requests) == 2


@pytest.mark.parametrize(("header", "seconds"), [("7", 7), ("Wed, 21 Oct 2099 07:28:00 GMT", 600), ("0.5", None)])
def test_a_server_postpones_a_request_by_ten_minutes_at_most(header: str, seconds: float | None) -> None:
    retry = client._LoggedRetry(1, failed=lambda reason: None)
    assert retry.get_retry_after(HTTPResponse(headers={"Retry-After": header})) == seconds


def test_control_characters_of_an_answer_are_not_printed() -> None:
    assert client.shown(b"\x1b[31mred\x1b[0m\nline\xff") == "\ufffd[31mred\ufffd[0m line\ufffd"
