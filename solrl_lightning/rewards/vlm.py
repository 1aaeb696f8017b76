"""reward=vlm, vlm_marks, vlm_edit: a vision-language model answers a question about the image and its prompt.

Where the prompt has an input image, the model sees that one first and then the image to score.

The reward is the expected value of the answer: the values of the possible answers, weighted by their probabilities as
the first word. With the answers yes and no it is VQAScore (Lin et al. 2024, arXiv 2404.01291, equation 1, here without
the probability of other words); with marks it is the weighting of G-Eval (Liu et al. 2023, arXiv 2303.16634, equation
1).
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from solrl_lightning.data.input_images import load_square
from solrl_lightning.data.prompt import INPUT_IMAGE
from solrl_lightning.options.rules import Count, CountOrZero, NotNegative, Positive
from solrl_lightning.rewards.addresses import check_url
from solrl_lightning.rewards.answers import LEAST, Answers, check_answered, normal, words
from solrl_lightning.rewards.base import Metadata, Reward
from solrl_lightning.rewards.client import Client, answers, noise, to_png, tried_out

_ALTERNATIVES = 20  # likeliest first words in an answer; the most that the API gives
# Qwen, Magistral, Kimi and Gemma; a chat template may have written the mark before, and _LONGEST cut off that after.
_THOUGHTS = re.compile(
    r".*(</think\w*>|\[/think\w*\]|◁/think▷|<channel\|>)|(<think|\[think|◁think▷|<\|channel>).*",
    re.DOTALL | re.IGNORECASE,
)
_PATH = re.compile(r"(/chat/completions)?/*(?=[?#]|$)")  # the end of an address's path, before a query
_WITHHELD = b'"content_filter"'  # reason of the end, or code of status 400, of Azure
_LONGEST = 2048  # tokens of an answer that is read as text, most of them thoughts


class VLMReward(Reward):
    """Asks a model behind an OpenAI-compatible API, such as vLLM, SGLang or a hosted one, one image a request.

    An image that was scored before with the same question is not asked about again.

    Args:
        url: address of the API; ``/chat/completions`` is added to its path. Its key is read from SOLRL_REWARD_TOKEN.
        model: name of the model there.
        question: text after the image, or the two; ``{prompt}`` stands for the prompt.
        answers: value of each answer, a word without regard to case; their mean, weighted by probability, is the score.
        logprobs: read the probabilities of the first word; False: read the first answer in the text, for a server that
            gives no probabilities.
        concurrency: requests at the same time, of every device.
        timeout: seconds without an answer, or from its first to its last byte, after which a request has failed.
        retries: attempts after the first one.
        backoff: seconds; retry n waits backoff * 2 ** (n - 1), at most 60, and the first one not at all.
        extra_body: keys that every request gets, or that null leaves out.

    Raises:
        UserError: ``url`` is no address, or has a password; the token in the environment has other characters.
    """

    name = "vlm"

    def __init__(
        self,
        url: str,
        model: str,
        question: str,
        answers: Answers,
        device: str | torch.device = "cpu",
        logprobs: bool = True,
        concurrency: Count = 16,
        timeout: Positive = 120.0,
        retries: CountOrZero = 8,
        backoff: NotNegative = 1.0,
        extra_body: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(device)
        check_url("url", url)
        self.extra_body = extra_body or {}
        self.url, self.model, self.question, self.logprobs = url, model, question, logprobs
        self.answers = {normal(answer): float(value) for answer, value in answers.items()}
        self.concurrency = concurrency
        self._costs = {"requests": 0, "tokens": 0}
        self._client = Client(_PATH.sub("/chat/completions", url, count=1), concurrency, timeout, retries, backoff)
        self._scored: dict[bytes, float] = {}
        self._withholds = False  # whether a content filter of the server has withheld an answer

    @property
    def costs(self) -> Mapping[str, int]:
        return self._costs

    def try_out(self, image: Tensor, prompt: str, metadata: Metadata) -> None:
        """Ask once about an image of noise, or two, before a model is loaded: no image of the run has a longer file."""
        _, height, width = image.shape
        png = to_png(noise(height, width))
        key = f"reward.{self.name}"
        too_large = f"; if an image of {width} x {height} is too large for it, raise its limit"
        fewer = f"set {key}.logprobs=false, or, if it gives fewer of them, +{key}.extra_body.top_logprobs=5"
        too_large += f"; if it refuses log probabilities, {fewer}" * self.logprobs
        too_large += f"; if it refuses another key, leave it out with +{key}.extra_body.<name>=null"
        with tried_out(key, self.url, f" and {key}.model=<the name of its model>{too_large}"):
            answer = self._ask(_Question([png] * (1 + (INPUT_IMAGE in metadata)), prompt), retries=False)
        other = f", or {key}.logprobs={str(not self.logprobs).lower()}"
        thinks = f". One that thinks must end within {_LONGEST} tokens" * (not self.logprobs)
        check_answered(answer.score, key, self.model, prompt, self.answers, f"{other}{thinks}")

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        """Return the expected values, float32 [B], of the answers about the images rounded to 8 bits.

        NaN where none of the answers is in the answer about an image, or a content filter withholds it.

        Raises:
            ServerError: a request still fails after the retries, or has an invalid answer.
        """
        levels = (images.float() * 255).round().byte().permute(0, 2, 3, 1).cpu()
        questions = [
            _Question([*_input_of(row, len(image)), to_png(image)], prompt)
            for image, prompt, row in zip(levels, prompts, metadata, strict=True)
        ]
        keys = [hashlib.sha256(b"".join([*pngs, prompt.encode()])).digest() for pngs, prompt in questions]
        missing = {key: question for key, question in zip(keys, questions, strict=True) if key not in self._scored}
        for key, answer in zip(missing, answers(self._ask, missing.values(), self.concurrency), strict=True):
            self._scored[key] = answer.score
            self._costs["requests"] += 1
            self._costs["tokens"] += answer.tokens
        return torch.tensor([self._scored[key] for key in keys], dtype=torch.float32, device=images.device)

    @property
    def named_in_errors(self) -> str:
        filtered = ", some withheld by a content filter" if self._withholds else ""
        return f"{self.name} of {self.model} (answers: {', '.join(self.answers)}{filtered})"

    def _ask(self, question: "_Question", retries: bool | None = None) -> "_Answer":
        """Return the score of the last of a question's images; ``retries=False`` sends the request once."""
        pngs, prompt = question
        urls = [f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in pngs]
        content: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content.append({"type": "text", "text": self.question.replace("{prompt}", prompt)})
        body: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        body |= {"temperature": 0, "max_tokens": 1 if self.logprobs else _LONGEST}
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": _ALTERNATIVES}
        body = {name: value for name, value in (body | self.extra_body).items() if value is not None}
        server = f"the server {self.url}, asked about the prompt {prompt!r},"
        rule = "a chat completion"
        if self.logprobs:
            rule += " with the log probabilities of the first word (for a server without them set "
            rule += f"reward.{self.name}.logprobs=false)"
        return self._client.ask(body, server, self._read, rule, retries, known=_WITHHELD)

    def _read(self, content: bytearray) -> "_Answer":
        if _WITHHELD in content:
            self._withholds = True
            return _Answer(math.nan, 0)
        score_of = _by_probability if self.logprobs else _by_text
        tree = json.loads(content)
        tokens = int((tree.get("usage") or {}).get("total_tokens") or 0)
        return _Answer(score_of(tree["choices"][0], self.answers), tokens)


def _input_of(metadata: Metadata, side: int) -> list[bytes]:
    """Return the PNG file of a prompt's input image, if it has one."""
    if INPUT_IMAGE not in metadata:
        return []
    return [to_png(torch.from_numpy(np.array(load_square(metadata[INPUT_IMAGE], side))))]


class _Question(NamedTuple):
    pngs: list[bytes]
    prompt: str


class _Answer(NamedTuple):
    score: float
    tokens: int


def _by_probability(choice: Mapping[str, Any], answers: Mapping[str, float]) -> float:
    """Return the expected value of the answers by the probabilities of the first word; NaN if it is none of them.

    Raises LookupError or TypeError if there is a word without probabilities.
    """
    if choice.get("logprobs") is None and not choice["message"].get("content"):  # withheld, by any name
        return math.nan
    weights, first = dict.fromkeys(answers, 0.0), choice["logprobs"]["content"][0]
    if not first["top_logprobs"]:
        raise LookupError("no probabilities")
    for alternative in first["top_logprobs"]:
        word = normal(alternative["token"])
        if word in weights:
            weights[word] += math.exp(alternative["logprob"])
    total = sum(weights.values())
    return sum(weights[word] * value for word, value in answers.items()) / total if total > LEAST else math.nan


def _by_text(choice: Mapping[str, Any], answers: Mapping[str, float]) -> float:
    """Return the value of the first answer in the text after its thoughts; NaN without one."""
    text = _THOUGHTS.sub("", choice["message"].get("content") or "")  # none: it was cut in its thoughts, or withheld
    forms = (normal(form) for word in words(text) for form in (word, word.rstrip(".+-")))
    return next((answers[word] for word in forms if word in answers), math.nan)
