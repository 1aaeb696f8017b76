"""Requests to servers that score images: JSON by POST, repeated where a later answer can differ."""

import io
import logging
import math
import multiprocessing
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor
from urllib3 import BaseHTTPResponse, PoolManager, Retry
from urllib3.exceptions import HTTPError, InvalidHeader, ProtocolError, ReadTimeoutError

from solrl_lightning.errors import ServerError, UserError, sentence
from solrl_lightning.machine import interrupts
from solrl_lightning.rewards.addresses import TOKEN, read_token

log = logging.getLogger(__name__)
T = TypeVar("T")
Question = TypeVar("Question")

_FAILURE = re.compile(rb'"finish_reason": ?"error"')  # of a chat completion with status 200, as OpenRouter's
_ERROR = re.compile(rb'^\s*{"error": ?{.*?"code": ?"?([1-5]\d\d)\b', re.DOTALL)  # with status 200, as OpenRouter's
_RETRIED = (408, 409, 425, 429, *range(500, 600))  # statuses of a server or proxy that may answer later
_MAX_BACKOFF, _MAX_RETRY_AFTER = 60, 600  # seconds
_TOO_LATE = "no reward server answered before the run was asked to end."
_SHOWN = 300  # characters of an answer in a message
_CHUNK, _LONGEST = 2**16, 2**24  # bytes of an answer that are read at once, and at all
_PATIENCE = 10  # seconds that answers take at most once a run was asked to end; then schedulers kill


class Client:
    """Posts JSON to an address, with the token of the environment, from up to ``concurrency`` threads.

    Arguments as in ``HTTPReward``. Raises ``UserError``: see ``read_token``.
    """

    def __init__(self, url: str, concurrency: int, timeout: float, retries: int, backoff: float) -> None:
        self.url, self.timeout, self.retries = url, timeout, retries
        token = read_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._logged = -math.inf  # when a failure was logged
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
        self._pool = PoolManager(maxsize=concurrency, retries=retry, timeout=timeout, headers=headers)

    def ask(
        self,
        body: dict[str, Any],
        server: str,
        read: Callable[[bytearray], T | None],
        rule: str,
        retries: bool | None = None,
        known: bytes = b"",
    ) -> T:
        """Return what ``read`` makes of the answer to one request; ``retries=False`` sends it once.

        Args:
            read: returns None, or raises, for an answer that breaks ``rule``.
            known: an answer that contains this is read, whatever its status.

        Raises:
            ServerError: the request still fails after the retries, or its answer breaks ``rule``; the message begins
                with ``server``.
        """
        try:
            status, location, content = self._post(body, retries)
        except HTTPError as error:
            raise ServerError(f"{server} does not answer: {sentence(getattr(error, 'reason', error))}") from error
        if status != 200 and not (known and known in content):
            token = f". Set its token with export {TOKEN}=<token>." if status in (401, 403) else ""
            moved = f" (Location: {location})" if 300 <= status < 400 and location else ""
            raise ServerError(f"{server} answered with status {status}{moved}: {shown(content)}{token}")
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
            if len(content) <= _LONGEST and (value := read(content)) is not None:
                return value
        rule = f"it must have at most {_LONGEST} bytes and be {rule}"
        raise ServerError(f"{server} gave an invalid answer: {rule}; got {shown(content)}")

    def _post(self, body: dict[str, Any], retries: Retry | bool | None) -> tuple[int, str, bytearray]:
        """Return status, ``Location`` and content of the answer to a request, repeated if reading it fails, too."""
        while True:
            options: dict[str, Any] = dict(redirect=False, retries=retries, preload_content=False)
            answer = self._pool.request("POST", self.url, json=body, **options)
            try:
                content = self._read(answer)
                failed = _ERROR.match(content) if answer.status == 200 else None
                status = int(failed[1]) if failed else answer.status
                if _FAILURE.search(content) or (failed and status in _RETRIED):
                    raise ProtocolError(f"It answered with an error: {shown(content)}")
                return status, answer.headers.get("Location", ""), content
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
        if time.monotonic() - self._logged > _MAX_BACKOFF:  # of several servers behind an address, one may be away
            self._logged = time.monotonic()
            log.warning("%s: %s Each request is sent again, up to %d times.", self.url, reason, self.retries)


class _LoggedRetry(Retry):
    """A ``Retry`` that calls ``failed`` with the reason of every attempt that is repeated."""

    def __init__(self, *args: Any, failed: Callable[[str], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._failed = failed

    def new(self, **options: Any) -> "_LoggedRetry":
        return super().new(failed=self._failed, **options)

    def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
        """Return the seconds that a server asks for; None, for the back-off, if it gives none as HTTP defines them."""
        try:
            seconds = super().get_retry_after(response)
        except InvalidHeader:
            return None
        return None if seconds is None else min(seconds, _MAX_RETRY_AFTER)

    def sleep(self, response: BaseHTTPResponse | None = None) -> None:
        """Wait before the next attempt.

        Raises:
            ServerError: the run was asked to end, perhaps by what has ended the server.
        """
        seconds = self.get_retry_after(response) if response is not None else None
        if interrupts.ENDING.wait(seconds or self.get_backoff_time()):
            raise ServerError(_TOO_LATE)

    def increment(self, *args: Any, **options: Any) -> "_LoggedRetry":
        following = super().increment(*args, **options)  # raises after the last attempt
        last = following.history[-1]
        self._failed(sentence(last.error) if last.error else f"it answered with status {last.status}.")
        return following


def answers(ask: Callable[[Question], T], questions: Iterable[Question], concurrency: int) -> Iterator[T]:
    """Yield what ``ask`` returns for each question, in order; so many of them are asked at the same time.

    Raises:
        ServerError: the run was asked to end, and its answers were waited for ten seconds since.
    """
    with ThreadPool(concurrency) as threads:  # daemons, which neither Ctrl-C nor an error waits for
        results, waited = threads.imap(ask, questions), 0
        while waited < _PATIENCE:
            try:
                yield results.next(timeout=1)
            except StopIteration:
                return
            except multiprocessing.TimeoutError:
                waited = waited + 1 if interrupts.ENDING.is_set() else 0
    raise ServerError(_TOO_LATE)


@contextmanager
def tried_out(key: str, url: str, fix: str) -> Iterator[None]:
    """Turn the ServerError of a trial request into a UserError about ``key``, the reward's, which ends with ``fix``."""
    try:
        yield
    except ServerError as error:
        raise UserError(
            f"{key}.url={url} is invalid: {sentence(error)} Start or correct the server, or set {key}.url=<its "
            f"address>{fix}."
        ) from error


def shown(content: bytes | bytearray) -> str:
    """Return the beginning of an answer, for a message."""
    text = " ".join(content[:_SHOWN].decode(errors="replace").split()) or "nothing"
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _is_no_retry(record: logging.LogRecord) -> bool:
    return not (isinstance(record.args, tuple) and record.args and isinstance(record.args[0], _LoggedRetry))


logging.getLogger("urllib3.connectionpool").addFilter(_is_no_retry)  # its "Retrying" for each attempt of each thread


def noise(height: int, width: int) -> Tensor:
    """Return an image, uint8 [height, width, 3]: none of this size has a longer PNG file."""
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def to_png(levels: Tensor) -> bytes:
    """Encode a uint8 image [H, W, 3] as PNG, compressed faster and less than by Pillow's default."""
    file = io.BytesIO()
    Image.fromarray(levels.numpy()).save(file, "PNG", compress_level=1)
    return file.getvalue()
