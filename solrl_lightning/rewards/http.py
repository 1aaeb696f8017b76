"""reward=http: a server scores the images. docs/rewards/http.md has the format of requests and answers.

Shapes: B images.
"""

import base64
import io
import json
import logging
import time
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from urllib3 import BaseHTTPResponse, PoolManager, Retry
from urllib3.exceptions import HTTPError, ReadTimeoutError

from solrl_lightning.errors import ServerError, UserError, sentence
from solrl_lightning.rewards.addresses import check_url, read_token
from solrl_lightning.rewards.base import Metadata, Reward, check_scores

log = logging.getLogger(__name__)

_RETRIED = (429, 500, 502, 503, 504)  # statuses of a server that may answer later
_MAX_BACKOFF = 60  # seconds
_SHOWN = 300  # characters of an answer in a message
_CHUNK, _LONGEST = 2**16, 2**24  # bytes of an answer that are read at once, and at all


class HTTPReward(Reward):
    """Posts batches of images to a server, several at the same time, and retries failed requests with back-off.

    Args:
        url: http or https address of the requests.
        batch: images per request.
        concurrency: requests at the same time.
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
        batch: int = 8,
        concurrency: int = 4,
        timeout: float = 60.0,
        retries: int = 8,
        backoff: float = 1.0,
    ) -> None:
        super().__init__(device)
        check_url("reward.http.url", url)
        self.url, self.batch, self.concurrency, self.retries = url, batch, concurrency, retries
        self.timeout = timeout
        self._silent = False  # since the last answer
        token = read_token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        # A score has no side effects, so a POST may be repeated.
        retry = _LoggedRetry(
            retries,
            failed=self._log_failure,
            allowed_methods=None,
            status_forcelist=_RETRIED,
            raise_on_status=False,
            backoff_factor=backoff,
            backoff_max=_MAX_BACKOFF,
        )
        self._pool = PoolManager(maxsize=concurrency, retries=retry, timeout=timeout)

    def check_prompts(self, prompts: list[str], metadata: list[Metadata]) -> None:
        """Ask once for the scores of ``batch`` grey images of the first prompt, before a model is loaded.

        Raises:
            UserError: the server does not answer, or not as agreed.
        """
        grey = torch.full((self.batch, 64, 64, 3), 128, dtype=torch.uint8)
        try:
            self._ask(grey, prompts[:1] * self.batch, metadata[:1] * self.batch, retries=False)
        except ServerError as error:
            raise UserError(
                f"reward.http.url={self.url} is invalid: {error} Start or correct the server, or set "
                f"reward.http.url=<its address>; if it takes fewer than {self.batch} images, set reward.http.batch=<n>."
            ) from error

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        """Scores, float32 [B], of the images rounded to 8 bits.

        Raises:
            ServerError: a request still fails after the retries, or has an invalid answer.
            NonFiniteError: a score is null, NaN or infinite.
        """
        levels = (images.float() * 255).round().byte().permute(0, 2, 3, 1).cpu()

        def ask(first: int) -> list[float]:
            part = slice(first, first + self.batch)
            return self._ask(levels[part], prompts[part], metadata[part])

        with ThreadPool(self.concurrency) as threads:  # daemons, which Ctrl-C does not wait for
            parts = threads.imap(ask, range(0, len(prompts), self.batch))
            scores_by_image = [score for part in parts for score in part]
        scores = torch.tensor(scores_by_image, dtype=torch.float32, device=images.device)
        check_scores(f"{self.name} of {self.url}", scores, prompts)
        return scores

    def _ask(
        self, levels: Tensor, prompts: list[str], metadata: Sequence[Metadata], retries: bool | None = None
    ) -> list[float]:
        """Scores of uint8 images [B, H, W, 3] by one request; ``retries=False`` sends it once."""
        images = [base64.b64encode(to_png(image)).decode() for image in levels]
        body = {"images": images, "prompts": prompts, "metadata": [dict(row) for row in metadata]}
        others = f" and {len(prompts) - 1} more" if len(prompts) > 1 else ""
        server = f"the reward server {self.url}, asked about the prompt {prompts[0]!r}{others},"
        try:
            status, content = self._post(body, retries)
        except HTTPError as error:
            raise ServerError(f"{server} does not answer: {sentence(getattr(error, 'reason', error))}") from error
        self._silent = False
        answer = " ".join(content[:_SHOWN].decode(errors="replace").split())
        if status != 200:
            raise ServerError(f"{server} answered with status {status}: {answer}")
        if len(content) > _LONGEST:
            raise ServerError(f"{server} gave an invalid answer: it must have at most {_LONGEST} bytes; got {answer}")
        scores = read_scores(content)
        if len(scores) != len(prompts):
            rule = f'it must be {{"scores": [...]}} with {len(prompts)} numbers'
            raise ServerError(f"{server} gave an invalid answer: {rule}; got {answer}")
        return scores

    def _post(self, body: dict[str, Any], retries: Retry | bool | None) -> tuple[int, bytearray]:
        """Return the status and the content of the answer to a request, which is repeated if reading it fails, too."""
        while True:
            options: dict[str, Any] = dict(redirect=False, retries=retries, preload_content=False)
            answer = self._pool.request("POST", self.url, json=body, headers=self._headers, **options)
            try:
                return answer.status, self._read(answer)
            except HTTPError as error:  # urllib3 has repeated the request up to here
                assert answer.retries is not None
                retries = answer.retries.increment("POST", self.url, error=error)
                retries.sleep()
            finally:
                answer.close()

    def _read(self, answer: BaseHTTPResponse) -> bytearray:
        """Return the content of an answer, decompressed; what is longer than `_LONGEST` is cut.

        Raises:
            HTTPError: the connection was lost, or the server has not sent all of it within the time-out.
        """
        content, end = bytearray(), time.monotonic() + self.timeout
        while len(content) <= _LONGEST and (part := answer.read1(_CHUNK)):
            content += part
            if time.monotonic() > end:
                pool = self._pool.connection_from_url(self.url)
                raise ReadTimeoutError(pool, self.url, f"Read timed out. (no end after {self.timeout} s)")
        return content

    def _log_failure(self, reason: str) -> None:
        if not self._silent:
            self._silent = True
            log.warning("%s: %s Each request is sent again, up to %d times.", self.url, reason, self.retries)


class _LoggedRetry(Retry):
    """A ``Retry`` that calls ``failed`` with the reason of every attempt that is repeated."""

    def __init__(self, *args: Any, failed: Callable[[str], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._failed = failed

    def new(self, **options: Any) -> "_LoggedRetry":
        return super().new(failed=self._failed, **options)

    def increment(self, *args: Any, **options: Any) -> "_LoggedRetry":
        following = super().increment(*args, **options)  # raises after the last attempt
        last = following.history[-1]
        self._failed(sentence(last.error) if last.error else f"it answered with status {last.status}.")
        return following


def read_scores(content: bytes | bytearray) -> list[float]:
    """Return the scores in an answer, NaN for null; none if it is not {"scores": [...]} with numbers and nulls."""
    try:
        answer = json.loads(content)
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if isinstance(scores, list) and all(type(score) in (int, float, type(None)) for score in scores):
            return [float("nan") if score is None else float(score) for score in scores]
    except (ValueError, RecursionError, OverflowError):
        pass
    return []


def _is_no_retry(record: logging.LogRecord) -> bool:
    return not (isinstance(record.args, tuple) and record.args and isinstance(record.args[0], _LoggedRetry))


logging.getLogger("urllib3.connectionpool").addFilter(_is_no_retry)  # its "Retrying" for each attempt of each thread


def to_png(levels: Tensor) -> bytes:
    """A PNG file of a uint8 image [H, W, 3], compressed faster and less than by Pillow's default."""
    file = io.BytesIO()
    Image.fromarray(levels.numpy()).save(file, "PNG", compress_level=1)
    return file.getvalue()
