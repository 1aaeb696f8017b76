"""reward=vlm, vlm_marks and vlm_edit against a server with the answers of an OpenAI-compatible API."""

import io
import json
import math
from base64 import b64decode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from reward_servers import in_thread

from solrl_lightning.data.input_images import load_square
from solrl_lightning.errors import NonFiniteError, ServerError, UserError
from solrl_lightning.rewards.addresses import TOKEN
from solrl_lightning.rewards.base import Metadata
from solrl_lightning.rewards.vlm import VLMReward

IMAGES = torch.rand(3, 3, 6, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a cat", "a {dog}", "a cat"]
QUESTION = 'Does it show "{prompt}"? Answer yes or no.'


def choice(text: str, **probabilities: float) -> dict[str, Any]:
    """A choice of a chat completion with the probabilities of first words, as vLLM and OpenAI give it."""
    words = [{"token": word, "logprob": math.log(p), "bytes": None} for word, p in probabilities.items()]
    first = {"token": text, "logprob": 0.0, "top_logprobs": words}
    return {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": {"content": [first]}}


class Server(BaseHTTPRequestHandler):
    """Answers the requests about an image with the choice at the place of its mean level in ``choices``."""

    url: str
    choices: list[Any]
    requests: list[dict[str, Any]]
    total: int | None = 10
    tokens: list[str | None]
    failures: int
    content: dict[str, Any] | None = None  # in place of a chat completion
    filtered = 200  # the status where a filter withholds an answer

    def do_POST(self) -> None:
        cls = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        *_, picture, _ = body["messages"][0]["content"]
        png = Image.open(io.BytesIO(b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))))
        places = [np.array_equal(np.asarray(png), row) for row in (IMAGES * 255).round().byte().permute(0, 2, 3, 1)]
        cls.requests.append(body | {"path": self.path, "place": places.index(True) if True in places else None})
        cls.tokens.append(self.headers["Authorization"])
        cls.failures -= 1
        answer = cls.choices[places.index(True) if True in places else 0]
        filtered = answer.get("finish_reason") == "content_filter"
        self.send_response(503 if cls.failures >= 0 else cls.filtered if filtered else 200)
        self.end_headers()
        completion = {"choices": [answer], "usage": {"total_tokens": cls.total}}
        self.wfile.write(json.dumps(cls.content or completion).encode())

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[type[Server]]:
    class Fresh(Server):
        choices = [choice("Yes", Yes=0.6, No=0.2, Maybe=0.1)] * 3
        requests: list[dict[str, Any]] = []
        tokens: list[str | None] = []
        failures = 0

    with in_thread(Fresh) as url:
        Fresh.url = url
        yield Fresh


def reward(server: type[Server], **options: Any) -> VLMReward:
    defaults = dict(model="judge", question=QUESTION, answers={"yes": 1.0, "no": 0.0}, backoff=0, timeout=5, retries=1)
    return VLMReward(f"{server.url}/v1", **(defaults | options))


def test_score_is_the_probability_of_yes_among_the_answers(server: type[Server]) -> None:
    server.choices = [
        choice("Yes", Yes=0.5, No=0.25, yes=0.125),
        choice("No", **{" No.": 0.75, "yes": 0.125, "It": 0.125}),
        choice("yes", yes=1.0),
    ]
    scores = reward(server)(IMAGES, PROMPTS)
    torch.testing.assert_close(scores, torch.tensor([0.625 / 0.875, 0.125 / 0.875, 1.0]))
    by_place = {request["place"]: request for request in server.requests}
    assert sorted(by_place) == [0, 1, 2]
    text = {"type": "text", "text": 'Does it show "a {dog}"? Answer yes or no.'}
    assert by_place[1]["messages"][0]["content"][1] == text and by_place[1]["path"] == "/v1/chat/completions"
    keys = {"model": "judge", "temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
    assert by_place[1].items() >= keys.items()


def test_extra_body_replaces_keys_of_a_request_and_null_leaves_one_out(server: type[Server]) -> None:
    extra = {"max_tokens": None, "max_completion_tokens": 4, "temperature": 1, "provider": {"sort": "price"}}
    reward(server, extra_body=extra)(IMAGES[:1], PROMPTS[:1])
    keys = {"model": "judge", "max_completion_tokens": 4, "temperature": 1, "provider": {"sort": "price"}}
    assert server.requests[0].items() >= keys.items() and "max_tokens" not in server.requests[0]


@pytest.mark.parametrize("path", ["/v1/?api-version=1", "/v1/chat/completions?api-version=1", "/v1//"])
def test_address_keeps_its_query(server: type[Server], path: str) -> None:
    judge = VLMReward(f"{server.url}{path}", "judge", QUESTION, {"yes": 1.0, "no": 0.0})
    assert judge(IMAGES[:1], PROMPTS[:1]) == pytest.approx(0.75)
    assert server.requests[0]["path"] == "/v1/chat/completions" + "?api-version=1" * ("?" in path)


def test_score_of_marks_is_their_expected_value(server: type[Server]) -> None:
    server.choices = [choice("4", **{"4": 0.5, "5": 0.25, "1": 0.25})] * 3
    marks = {mark: (mark - 1) / 4 for mark in range(1, 6)}  # as YAML and the command line have them without quotes
    scores = reward(server, answers=marks)(IMAGES, PROMPTS)
    torch.testing.assert_close(scores, torch.full((3,), 0.5 * 0.75 + 0.25))


def test_answer_is_read_as_text_where_there_are_no_probabilities(server: type[Server]) -> None:
    texts = ["I say: No, it is not. Yes?", "**Yes**", "ＹＥＳ."]
    server.choices = [{"message": {"content": text}} for text in texts]
    assert reward(server, logprobs=False)(IMAGES, PROMPTS).tolist() == [0.0, 1.0, 1.0]
    thoughts = ["<think>There is no doubt.</think>\nYes", "<Thinking>No.</thinking>yes", "[THINK]no[/THINK] yes"]
    server.choices = [{"message": {"content": text}} for text in thoughts]
    assert reward(server, logprobs=False)(IMAGES, PROMPTS).tolist() == [1.0, 1.0, 1.0]
    thoughts = ["No, wait.\n</think>\nYes", "◁think▷no◁/think▷yes", "<|channel>thought\nno<channel|>yes"]
    server.choices = [{"message": {"content": text}} for text in thoughts]  # whose mark may be in the chat template
    assert reward(server, logprobs=False)(IMAGES, PROMPTS).tolist() == [1.0, 1.0, 1.0]
    server.choices[0]["message"]["content"] = "<think>There is no"  # cut off
    with pytest.raises(NonFiniteError):
        reward(server, logprobs=False)(IMAGES, PROMPTS)
    server.choices = [{"message": {"content": text}} for text in ("Mark: 4.0", "**５**", "1.")]
    marks = {str(mark): float(mark) for mark in range(1, 6)}
    assert reward(server, logprobs=False, answers=marks)(IMAGES, PROMPTS).tolist() == [4.0, 5.0, 1.0]
    server.choices = [{"message": {"content": text}} for text in ("Mark: \u22121", "**\u20131.0**", "1\u20132")]
    assert reward(server, logprobs=False, answers={"-1": -1.0, "1": 1.0})(IMAGES, PROMPTS).tolist() == [-1, -1, 1]
    server.choices = [{"message": {"content": text}} for text in ("\uff0d1", "\u207b\u00b9", "\u20111")]
    assert reward(server, logprobs=False, answers={"-1": -1.0, "1": 1.0})(IMAGES, PROMPTS).tolist() == [-1, -1, -1]
    for yes, no in (
        ("हाँ", "नहीं"),
        ("ใช่", "ไม่ใช่"),
        ("ஆம்", "இல்லை"),
        ("نعم", "می‌خواهم"),
        ("A+", "B-"),
        ("very_good", "bad"),
    ):
        said = (f"- {yes}। {no}!", f"**{no}**: {yes}", f"__{yes}__")
        server.choices = [{"message": {"content": text}} for text in said]
        answers = {yes: 1.0, no: 0.0}
        assert reward(server, logprobs=False, answers=answers)(IMAGES, PROMPTS).tolist() == [1.0, 0.0, 1.0], yes
    server.requests.clear()
    server.choices = [{"message": {"content": text}} for text in texts]
    reward(server, logprobs=False)(IMAGES[:1], PROMPTS[:1])
    assert "logprobs" not in server.requests[0] and server.requests[0]["max_tokens"] == 2048
    with pytest.raises(ServerError, match=r"the first word .*set reward.vlm.logprobs=false\); got"):
        reward(server)(IMAGES, PROMPTS)


@pytest.mark.parametrize("logprobs", [True, False])
def test_other_answer_is_no_score(server: type[Server], logprobs: bool) -> None:
    server.choices[1] = choice("Perhaps", Perhaps=0.9999, yes=0.0001)
    with pytest.raises(NonFiniteError, match=r"judge \(answers: yes, no\) is nan for the prompt 'a {dog}'") as error:
        reward(server, logprobs=logprobs)(IMAGES, PROMPTS)
    assert error.value.row == 1


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_that_a_content_filter_withholds_is_no_score(
    server: type[Server], logprobs: bool, status: int
) -> None:
    server.choices[1] = {"message": {"content": None}, "logprobs": None, "finish_reason": "content_filter"}
    server.filtered = status
    judge = reward(server, logprobs=logprobs)
    assert judge(IMAGES[:1], PROMPTS[:1]) > 0.7
    with pytest.raises(
        NonFiniteError, match=r"yes, no, some withheld by a content filter\) is nan .* 'a {dog}'"
    ) as error:
        judge(IMAGES, PROMPTS)
    assert error.value.row == 1


def test_an_error_within_an_answer_is_repeated(server: type[Server]) -> None:
    server.choices[1] = {"finish_reason": "error", "error": {"code": 502}, "message": {"content": ""}}
    with pytest.raises(ServerError, match='does not answer: It answered with an error: {"choices": .* 502'):
        reward(server)(IMAGES, PROMPTS)
    assert [request["place"] for request in server.requests].count(1) == 2


@pytest.mark.parametrize(("code", "requests"), [(502, 2), ("429", 2), (401, 1)])
def test_an_error_in_place_of_an_answer_is_as_its_status(server: type[Server], code: int | str, requests: int) -> None:
    server.content = {"error": {"message": "Provider returned error", "code": code}, "user_id": "u"}
    message = "It answered with an error: {" if requests == 2 else f"answered with status 401: .* {TOKEN}"
    with pytest.raises(ServerError, match=message):
        reward(server)(IMAGES[:1], PROMPTS[:1])
    assert len(server.requests) == requests


@pytest.mark.parametrize("logprobs", [True, False])
def test_a_message_without_content_is_no_score(server: type[Server], logprobs: bool) -> None:
    server.choices[1] = {"message": {"role": "assistant"}, "finish_reason": "content_filter: PROHIBITED_CONTENT"}
    with pytest.raises(NonFiniteError) as error:
        reward(server, logprobs=logprobs)(IMAGES, PROMPTS)
    assert error.value.row == 1


def test_an_answer_without_alternatives_has_no_probabilities(server: type[Server]) -> None:
    server.choices[0] = choice("Yes")
    with pytest.raises(ServerError, match="with the log probabilities of the first word"):
        reward(server)(IMAGES[:1], PROMPTS[:1])


def test_equal_image_is_one_request_and_requests_are_counted(server: type[Server]) -> None:
    judge = reward(server)
    images, prompts = torch.cat([IMAGES, IMAGES[:1], IMAGES[:1]]), [*PROMPTS, PROMPTS[0], "another"]
    scores = judge(images, prompts)
    assert judge.costs == {"requests": 4, "tokens": 40} and scores[0] == scores[3]
    assert judge(images, prompts).equal(scores) and len(server.requests) == 4
    server.total = None  # as some proxies answer
    judge(images[:1], ["one more"])
    assert judge.costs == {"requests": 5, "tokens": 40}


def test_input_image_of_the_prompt_comes_before_the_image(server: type[Server], tmp_path: Path) -> None:
    Image.fromarray(np.arange(8 * 6 * 3, dtype=np.uint8).reshape(6, 8, 3)).save(tmp_path / "in.png")
    rows: list[Metadata] = [{}, {"image": "in.png", "input_image": str(tmp_path / "in.png")}]
    judge = reward(server)
    judge.try_out(IMAGES[0], PROMPTS[0], rows[1])  # with as many images as in the run
    assert [part["type"] for part in server.requests.pop()["messages"][0]["content"]] == ["image_url"] * 2 + ["text"]
    images, prompts = IMAGES[:2].repeat(2, 1, 1, 1), [*PROMPTS[:2]] * 2
    judge(images, prompts, [*rows, {}, {}])
    contents = {(request["place"], len(request["messages"][0]["content"])) for request in server.requests}
    assert contents == {(0, 2), (1, 3), (1, 2)} and judge.costs["requests"] == 3  # the first was asked about before
    ((shown, _, _),) = (r["messages"][0]["content"] for r in server.requests if len(r["messages"][0]["content"]) == 3)
    png = io.BytesIO(b64decode(shown["image_url"]["url"].removeprefix("data:image/png;base64,")))
    assert np.array_equal(np.asarray(Image.open(png)), np.asarray(load_square(str(tmp_path / "in.png"), 6)))


def test_failed_request_is_repeated_with_the_token(server: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    server.failures = 1
    assert reward(server)(IMAGES[:1], PROMPTS[:1]) == pytest.approx(0.75)
    assert server.tokens == ["Bearer secret"] * 2


def test_a_limit_of_the_server_is_met_before_the_run(server: type[Server]) -> None:
    reward(server).try_out(torch.zeros(3, 40, 48), PROMPTS[0], {})
    (request,) = server.requests
    png = request["messages"][0]["content"][0]["image_url"]["url"]
    assert len(png) > 40 * 48 * 3 * 4 / 3  # as long as a picture can be
    server.failures = 1
    with pytest.raises(UserError, match="status 503.* if an image of 48 x 40 is too large for it, raise its limit"):
        reward(server).try_out(torch.zeros(3, 40, 48), PROMPTS[0], {})


def test_model_that_is_cut_in_its_thoughts_is_an_error_before_the_run(server: type[Server]) -> None:
    server.choices[0] = {"finish_reason": "length", "message": {"content": None}}
    with pytest.raises(UserError, match="gives none of yes, no.* One that thinks must end within 2048 tokens"):
        reward(server, logprobs=False).try_out(IMAGES[0], PROMPTS[0], {})


@pytest.mark.parametrize("logprobs", [True, False])
def test_model_that_answers_otherwise_is_an_error_before_the_run(server: type[Server], logprobs: bool) -> None:
    server.choices[0] = choice("Perhaps", Perhaps=1.0)
    judge = reward(server, logprobs=logprobs)
    judge.name = "taste"
    rule = r"reward.taste.answers is invalid: the model judge.*'a cat', gives none of yes, no\..* or reward.taste."
    with pytest.raises(UserError, match=f"{rule}logprobs={str(not logprobs).lower()}"):
        judge.try_out(IMAGES[0], PROMPTS[0], {})
