"""reward=http against servers that answer, fail, hang and die; and the examples of docs/rewards/http.md."""

import gzip
import io
import json
import logging
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
import torch
from PIL import Image
from reward_servers import free_port, in_thread, kill, start, started
from torch import Tensor

from solrl_lightning.errors import NonFiniteError, ServerError, UserError
from solrl_lightning.rewards.addresses import TOKEN
from solrl_lightning.rewards.http import HTTPReward

PROMPTS = ["a cat", "zwölf Käuze", 'a "dog"', "a fish", "a cat"]
METADATA = [{"count": 1}, {}, {"include": [{"class": "dog"}]}, {"tag": "x"}, {"count": 1}]


def images() -> Tensor:
    return torch.rand(5, 3, 6, 8, generator=torch.Generator().manual_seed(0))


class Handler(BaseHTTPRequestHandler):
    """Answers a request with ``replies``, the last of them again and again: status, body, seconds to wait."""

    replies: list[tuple[int, str, float]]
    requests: list[dict[str, Any]]
    headers_seen: list[Any]
    at_once: int
    most_at_once: int
    before_reply: Callable[[], object]

    def do_POST(self) -> None:
        cls = type(self)
        cls.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        cls.headers_seen.append(self.headers)
        cls.at_once += 1
        cls.most_at_once = max(cls.most_at_once, cls.at_once)
        status, body, seconds = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        cls.before_reply()
        time.sleep(seconds)
        cls.at_once -= 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        with suppress(BrokenPipeError):  # the client has timed out
            self.wfile.write(body.encode())

    def log_message(self, *args: Any) -> None:
        pass


class Server:
    def __init__(self, url: str, handler: type[Handler]) -> None:
        self.url, self.handler = url, handler

    def will_reply(self, *replies: tuple[int, str, float]) -> None:
        self.handler.replies = list(replies)

    def reward(self, **options: Any) -> HTTPReward:
        return HTTPReward(self.url, **({"retries": 1, "backoff": 0, "timeout": 5} | options))


@pytest.fixture
def server() -> Iterator[Server]:
    state: dict[str, Any] = {"replies": [], "requests": [], "headers_seen": [], "at_once": 0, "most_at_once": 0}
    state["before_reply"] = lambda: None
    handler = type("Scripted", (Handler,), state)
    with in_thread(handler) as url:
        yield Server(url, handler)


def decoded(png: str) -> Tensor:
    picture = Image.open(io.BytesIO(b64decode(png)), formats=["PNG"])
    assert picture.mode == "RGB"
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)


def test_request_has_the_images_prompts_and_metadata(server: Server) -> None:
    server.will_reply((200, '{"scores": [1, 2.5, -3, 0, 1e-3]}', 0))
    scores = server.reward(batch=5)(images(), PROMPTS, METADATA)
    assert scores.dtype == torch.float32 and scores.tolist() == torch.tensor([1, 2.5, -3, 0, 1e-3]).tolist()
    (request,) = server.handler.requests
    assert request["prompts"] == PROMPTS and request["metadata"] == METADATA and len(request) == 3
    sent = torch.stack([decoded(png) for png in request["images"]])
    assert torch.equal(sent, (images() * 255).round().byte().permute(0, 2, 3, 1))


def test_every_request_has_the_prompts_and_metadata_of_its_images(server: Server) -> None:
    server.will_reply((200, '{"scores": [1, 2]}', 0), (200, '{"scores": [3, 4]}', 0), (200, '{"scores": [5]}', 0))
    assert server.reward(batch=2, concurrency=1)(images(), PROMPTS, METADATA).tolist() == [1, 2, 3, 4, 5]
    for first, request in zip((0, 2, 4), server.handler.requests, strict=True):
        rows = slice(first, first + 2)
        assert (request["prompts"], request["metadata"]) == (PROMPTS[rows], METADATA[rows])
        sent = torch.stack([decoded(png) for png in request["images"]])
        assert torch.equal(sent, (images()[rows] * 255).round().byte().permute(0, 2, 3, 1))


def test_example_server_scores_batches_in_order_and_survives_a_restart() -> None:
    port, flat = free_port(), torch.zeros(5, 3, 6, 8)
    flat[1], flat[3] = images()[0], images()[1]  # noise takes more bytes than black
    with started("example_server.py", port) as url:
        for batch in (1, 2, 5):
            reward = HTTPReward(url, batch=batch, retries=4, backoff=0.05)
            scores = reward(flat, PROMPTS)
            assert scores[0] == scores[2] == scores[4] < 0.1 < scores[1].minimum(scores[3])
    with started("example_server.py", port):  # the connections that the reward has kept are dead
        assert torch.equal(reward(flat, PROMPTS), scores)


@pytest.mark.slow
def test_server_that_is_killed_during_a_request_and_restarted_loses_nothing() -> None:
    """The first server hangs until it is killed, the second one takes its port."""
    port = free_port()
    hanging = start_hanging(port)
    reward = HTTPReward(f"http://127.0.0.1:{port}/score", batch=2, retries=8, backoff=0.05)

    def restart() -> None:
        hanging.stdout.readline()  # a request has arrived
        kill(hanging)
        time.sleep(0.1)
        restarted.append(start("example_server.py", port))

    restarted: list[Any] = []
    thread = threading.Thread(target=restart)
    thread.start()
    try:
        scores = reward(images(), PROMPTS)
        assert torch.equal(scores, reward(images(), PROMPTS)) and scores.min() > 0.1
    finally:
        kill(hanging)
        thread.join()
        hanging.stdout.close()
        for process in restarted:
            kill(process)


def start_hanging(port: int) -> Any:
    code = (
        "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print('up', flush=True);"
        "c = s.accept()[0]; c.recv(10); print('asked', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-IS", "-c", code, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def test_requests_run_at_the_same_time_up_to_the_concurrency(server: Server) -> None:
    meeting = threading.Barrier(3)  # of the first three; the last two would wait in vain
    server.handler.before_reply = lambda: meeting.wait(30) if len(server.handler.requests) <= 3 else None
    server.will_reply((200, '{"scores": [1]}', 0.1))
    assert server.reward(batch=1, concurrency=3)(images(), PROMPTS).tolist() == [1] * 5
    assert server.handler.most_at_once == 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failing_server_is_asked_again_until_it_answers(server: Server, status: int) -> None:
    server.will_reply((status, "busy", 0), (status, "busy", 0), (200, '{"scores": [1, 1, 1, 1, 1]}', 0))
    assert server.reward(batch=5, retries=2)(images(), PROMPTS).tolist() == [1] * 5
    assert len(server.handler.requests) == 3 and server.handler.requests[0] == server.handler.requests[2]


def test_slow_server_is_asked_again_after_the_time_out(server: Server) -> None:
    answer = '{"scores": [1, 1, 1, 1, 1]}'
    server.will_reply((200, answer, 1.5), (200, answer, 0))
    assert server.reward(batch=5, timeout=0.5)(images(), PROMPTS).tolist() == [1] * 5
    assert len(server.handler.requests) == 2


@pytest.mark.parametrize(
    ("reply", "requests", "message"),
    [
        ((503, "loading", 0), 2, "answered with status 503: loading"),
        ((200, "late", 1.5), 2, "does not answer: .*Read timed out"),
        ((401, '{"detail": "wrong token"}', 0), 1, 'answered with status 401: {"detail": "wrong token"}'),
        ((302, "", 0), 1, "answered with status 302"),
        ((200, "<html>hello", 0), 1, r'invalid answer: it must be {"scores": \[...\]} with 5 numbers; got <html>hello'),
        ((200, '{"score": 1}', 0), 1, 'invalid answer: .*got {"score": 1}'),
        ((200, "[1, 2, 3, 4, 5]", 0), 1, "invalid answer"),
        ((200, '{"scores": [1, 2, 3]}', 0), 1, "invalid answer: .* 5 numbers; got .*1, 2, 3"),
        ((200, '{"scores": [1, 2, 3, 4, "high"]}', 0), 1, "invalid answer"),
        ((200, '{"scores": [1, 2, 3, 4, [5]]}', 0), 1, "invalid answer"),
        ((200, '{"scores": "12345"}', 0), 1, "invalid answer: .* with 5 numbers; got .*12345"),
        ((200, '{"scores": {"0": 5, "1": 4, "2": 3, "3": 2, "4": 1}}', 0), 1, "invalid answer"),  # of pandas
        ((200, '{"scores": ["1", "2", "3", "4", "5"]}', 0), 1, "invalid answer"),
        ((200, '{"scores": [1, 2, 3, 4, true]}', 0), 1, "invalid answer"),
        ((200, '{"scores": [1, 2, 3, 4, 1%s]}' % ("0" * 400), 0), 1, "invalid answer"),  # no float
        ((200, "[" * 100_000, 0), 1, r"invalid answer: .* with 5 numbers; got \[\["),
        ((200, "<html>\n\n<p>hello", 0), 1, "got <html> <p>hello"),
    ],
)
def test_error_names_the_server_and_the_sample(
    server: Server, reply: tuple[int, str, float], requests: int, message: str
) -> None:
    server.will_reply(reply)
    where = re.escape(f"the reward server {server.url}, asked about the prompt 'a cat' and 4 more, ")
    with pytest.raises(ServerError, match=f"^{where}.*{message}"):
        server.reward(batch=5, timeout=0.5)(images(), PROMPTS)
    assert len(server.handler.requests) == requests


class Poured(BaseHTTPRequestHandler):
    """Answers with ``parts``, with a pause before each of them."""

    parts: list[bytes]
    pause: float = 0
    encoding = "identity"
    sent = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Encoding", self.encoding)
        self.send_header("Content-Length", str(sum(map(len, self.parts))))
        self.end_headers()
        with suppress(ConnectionError):  # the client has closed it
            for part in self.parts:
                time.sleep(self.pause)
                self.wfile.write(part)
                type(self).sent += 1

    def log_message(self, *args: Any) -> None:
        pass


def poured(**options: Any) -> type[Poured]:
    return type("Filled", (Poured,), options)


def test_answer_without_an_end_is_a_time_out() -> None:
    """Each byte comes in time."""
    with in_thread(poured(parts=[b" "] * 100, pause=0.02)) as url:
        with pytest.raises(
            ServerError, match="asked about the prompt 'a cat' and 4 more, does not answer: .*no end af"
        ):
            HTTPReward(url, batch=5, retries=1, backoff=0, timeout=0.1)(images(), PROMPTS)


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_long_answer_is_read_up_to_a_limit(encoding: str) -> None:
    """32 MB, compressed to less than one."""
    million = b"1, " * 333_333
    parts = [b'{"scores": [', *[million] * 32]
    parts = [gzip.compress(b"".join(parts), 1)] if encoding == "gzip" else parts
    with in_thread(handler := poured(parts=parts, encoding=encoding)) as url:
        tracemalloc.start()
        with pytest.raises(ServerError, match=r"invalid answer: it must have at most 16777216 bytes; got .*\[1, 1, "):
            HTTPReward(url, batch=5, retries=0)(images(), PROMPTS)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (handler.sent < 32 or encoding == "gzip") and peak < 50e6


def test_compressed_answer_is_read() -> None:
    answer = gzip.compress(b'{"scores": [1, 2, 3, 4, 5]}')
    with in_thread(poured(parts=[answer], encoding="gzip")) as url:
        assert HTTPReward(url, batch=5, retries=0)(images(), PROMPTS).tolist() == [1, 2, 3, 4, 5]


def test_answer_that_breaks_off_is_asked_for_again() -> None:
    class Broken(Poured):
        parts = [b'{"scores": [1, 2,']
        missing = 9

        def send_header(self, keyword: str, value: str) -> None:
            whole = keyword == "Content-Length" and self.missing
            super().send_header(keyword, str(int(value) + self.missing) if whole else value)

        def do_POST(self) -> None:
            super().do_POST()
            type(self).parts, type(self).missing = [b'{"scores": [1, 2, 3, 4, 5]}'], 0

    with in_thread(Broken) as url:
        assert HTTPReward(url, batch=5, retries=1, backoff=0)(images(), PROMPTS).tolist() == [1, 2, 3, 4, 5]


def test_error_about_a_refused_connection_names_the_server_and_the_sample() -> None:
    url = f"http://127.0.0.1:{free_port()}/score"
    with pytest.raises(ServerError, match=f"{url}, asked about the prompt 'a cat', does not answer: .*refused"):
        HTTPReward(url, batch=1, retries=1, backoff=0)(images(), PROMPTS)


def test_outage_is_logged_in_one_line(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    answer = (200, '{"scores": [1, 1, 1, 1, 1]}', 0)
    server.will_reply((503, "busy", 0), (503, "busy", 0), answer)
    reward = server.reward(batch=5, retries=3)
    reward(images(), PROMPTS)
    (line,) = caplog.messages
    assert line == f"{server.url}: it answered with status 503. Each request is sent again, up to 3 times."
    server.will_reply((200, "late", 1.5), answer)
    server.reward(batch=5, timeout=0.5)(images(), PROMPTS)
    assert len(caplog.messages) == 2 and "Read timed out" in caplog.messages[1]
    server.will_reply((503, "busy", 0), answer)
    reward(images(), PROMPTS)
    assert len(caplog.messages) == 3  # another outage of the first reward's server


@pytest.mark.parametrize("value", ["NaN", "null", "Infinity"])
def test_error_about_a_score_that_is_not_finite_names_the_server_and_the_sample(server: Server, value: str) -> None:
    server.will_reply((200, '{"scores": [1]}', 0), (200, f'{{"scores": [{value}]}}', 0), (200, '{"scores": [1]}', 0))
    with pytest.raises(NonFiniteError, match=f"http of {server.url} is (nan|inf) .*'zwölf Käuze'") as caught:
        server.reward(batch=1, concurrency=1)(images(), PROMPTS)
    assert caught.value.row == 1


def test_token_is_sent_and_in_no_message(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN, "s3cret\n")
    server.will_reply((503, "busy", 0))
    with caplog.at_level(logging.DEBUG), pytest.raises(ServerError) as caught:
        server.reward(batch=5)(images(), PROMPTS)
    assert server.handler.headers_seen[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in caplog.text + str(caught.value)
    monkeypatch.setenv(TOKEN, "s3\u00e9cret")
    with pytest.raises(UserError) as refused:
        server.reward()
    assert TOKEN in str(refused.value) and "cret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host/score", "http://", "http://me:s3cret@host/score", "http://[::1/", None]
)
def test_url_that_is_no_address_or_has_a_password_is_refused(url: Any) -> None:
    with pytest.raises(
        UserError, match="reward.http.url=.* is invalid: it must begin with http:// or https://"
    ) as caught:
        HTTPReward(url)
    assert "s3cret" not in str(caught.value)


# The judge of the page, and a stand-in of the API


class API(BaseHTTPRequestHandler):
    """The chat completions of an OpenAI-compatible server: marks by brightness, and errors for some prompts."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions" and self.headers["Authorization"] == "Bearer k3y"
        (message,) = body["messages"]
        text, picture = message["content"]
        found = body["model"], message["role"], text["type"], picture["type"]
        assert found == ("judge-7b", "user", "text", "image_url")
        header, _, png = picture["image_url"]["url"].partition(",")
        assert header == "data:image/png;base64"
        mark = round(10 * float(decoded(png).float().mean()) / 255)
        said = "I cannot say." if "fog" in text["text"] else f"Mark: {mark}."
        answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": said}}]}
        self.send_response(500 if "storm" in text["text"] else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args: Any) -> None:
        pass


def test_judge_of_the_page_asks_an_openai_compatible_api() -> None:
    grey = torch.tensor([0.2, 0.9, 1.0])[:, None, None, None].expand(-1, 3, 8, 8)
    with in_thread(API) as api:
        judge = {"JUDGE_URL": f"{api}/v1", "JUDGE_MODEL": "judge-7b", "JUDGE_KEY": "k3y"}
        with started("judge.py", free_port(), judge) as url:
            reward = HTTPReward(url, batch=2, retries=0)
            assert reward(grey, PROMPTS[:3]).tolist() == torch.tensor([0.2, 0.9, 1.0]).tolist()
            with pytest.raises(NonFiniteError, match="is nan for the prompt 'fog'"):
                reward(grey, ["a cat", "a dog", "fog"])
            with pytest.raises(ServerError, match="'storm', answered with status 502"):
                reward(grey, ["a cat", "a dog", "storm"])


def test_server_is_asked_once_before_a_model_is_loaded(server: Server) -> None:
    server.will_reply((200, '{"scores": [null, 1]}', 0))
    server.reward(batch=2).check_prompts(["a cat", "a dog"], [{"tag": "one"}, {}])
    (asked,) = server.handler.requests
    assert (asked["prompts"], asked["metadata"], len(asked["images"])) == (["a cat"] * 2, [{"tag": "one"}] * 2, 2)
    server.will_reply((503, "busy", 0))
    with pytest.raises(
        UserError, match=f"reward.http.url={server.url} is invalid: .* status 503: busy.* Start or correct"
    ):
        server.reward(retries=5).check_prompts(["a cat"], [{}])
    assert len(server.handler.requests) == 2
