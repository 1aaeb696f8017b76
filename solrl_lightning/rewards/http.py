"""reward=http: a server scores the images. docs/rewards/http.md has the format of requests and answers."""

import base64
import json
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from solrl_lightning.options.rules import Count, CountOrZero, NotNegative, Positive
from solrl_lightning.rewards.addresses import check_url
from solrl_lightning.rewards.base import Metadata, Reward
from solrl_lightning.rewards.client import Client, answers, noise, to_png, tried_out


class HTTPReward(Reward):
    """Posts batches of images to a server, several at the same time, and retries failed requests with back-off.

    Args:
        url: http or https address of the requests; their token is read from SOLRL_REWARD_TOKEN.
        batch: images per request.
        concurrency: requests at the same time, of every device.
        timeout: seconds without an answer, or from its first to its last byte, after which a request has failed.
        retries: attempts after the first one.
        backoff: seconds; retry n waits backoff * 2 ** (n - 1), at most 60, and the first one not at all.

    Raises:
        UserError: ``url`` is no address, or has a password; the token in the environment has other characters.
    """

    name = "http"

    def __init__(
        self,
        url: str,
        device: str | torch.device = "cpu",
        batch: Count = 8,
        concurrency: Count = 4,
        timeout: Positive = 60.0,
        retries: CountOrZero = 8,
        backoff: NotNegative = 1.0,
    ) -> None:
        super().__init__(device)
        check_url("url", url)
        self.url, self.batch, self.concurrency = url, batch, concurrency
        self._client = Client(url, concurrency, timeout, retries, backoff)

    def try_out(self, image: Tensor, prompt: str, metadata: Metadata) -> None:
        """Ask once for the scores of ``batch`` images of noise: no image of the run has a longer PNG file."""
        _, height, width = image.shape
        images = [noise(height, width)] * self.batch
        fix = f"; if {self.batch} images of {width} x {height} are too many for it, raise its limit, or set "
        key = f"reward.{self.name}"
        with tried_out(key, self.url, f"{fix}{key}.batch=<n>"):
            self._ask(images, [prompt] * self.batch, [metadata] * self.batch, retries=False)

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        """Return scores, float32 [B], of the images rounded to 8 bits; a null is NaN."""
        levels = (images.float() * 255).round().byte().permute(0, 2, 3, 1).cpu()

        def ask(first: int) -> list[float]:
            part = slice(first, first + self.batch)
            return self._ask(levels[part], prompts[part], metadata[part])

        parts = answers(ask, range(0, len(prompts), self.batch), self.concurrency)
        scores_by_image = [score for part in parts for score in part]
        return torch.tensor(scores_by_image, dtype=torch.float32, device=images.device)

    @property
    def named_in_errors(self) -> str:
        return f"{self.name} of {self.url}"

    def _ask(
        self, levels: Iterable[Tensor], prompts: list[str], metadata: Sequence[Metadata], retries: bool | None = None
    ) -> list[float]:
        """Return scores of uint8 images, each [H, W, 3], by one request; ``retries=False`` sends it once."""
        images = [base64.b64encode(to_png(image)).decode() for image in levels]
        body = {"images": images, "prompts": prompts, "metadata": [dict(row) for row in metadata]}
        others = f" and {len(prompts) - 1} more" if len(prompts) > 1 else ""
        server = f"the reward server {self.url}, asked about the prompt {prompts[0]!r}{others},"
        rule = f'{{"scores": [...]}} with {len(prompts)} numbers'
        return self._client.ask(body, server, partial(read_scores, len(prompts)), rule, retries)


def read_scores(count: int, content: bytearray) -> list[float] | None:
    """Return the scores in an answer, NaN for null; None if they are not a list of ``count`` numbers and nulls."""
    scores = json.loads(content)["scores"]
    numbers = isinstance(scores, list) and all(type(score) in (int, float, type(None)) for score in scores)
    if not numbers or len(scores) != count:
        return None
    return [float("nan") if score is None else float(score) for score in scores]
