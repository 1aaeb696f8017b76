"""Samples and scores candidates by explorers: seeds are sent; scores come back, and latents if a stage continues.

A *chunk*, as many candidates as one process would put into a forward pass, is a separate request, so equal machines
give equal bits, whoever answers. An explorer holds nothing but adapter weights: a chunk whose explorer is lost goes to
another one, and an explorer may come, leave and come again at any time.

Shapes: B chunk, P prompts, N pool.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
from torch import Tensor
from urllib3 import PoolManager
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError

from solrl_lightning.errors import ServerError, UserError, sentence
from solrl_lightning.explorers import messages
from solrl_lightning.explorers.facts import PRECISION, Facts, differences, read_facts
from solrl_lightning.explorers.messages import Request
from solrl_lightning.policies.lora import State
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.rewards.addresses import TOKEN
from solrl_lightning.rewards.client import shown
from solrl_lightning.rollout.chunks import BatchSize, Chunk, SamplingSpec
from solrl_lightning.rollout.records import EncodedPrompts
from solrl_lightning.sampling.state import map_tensors

log = logging.getLogger(__name__)

REQUESTS = 2
"""To an explorer at the same time: one is computed while the other one travels."""
_AGAIN = 1.0  # seconds until a lost explorer is asked again
_CONNECT = 5.0  # seconds
_ALIVE = [  # a machine that vanishes is noticed after some twenty seconds instead of the time-out
    *HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *[
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}.items()
        if hasattr(socket, name)
    ],
]


class Lost(RuntimeError):
    """An explorer that does not answer, or whose chunks are of no use; the message says why."""


class Connection:
    """An explorer as the run sees it.

    Args:
        url: its address.
        token: of its requests; empty for none.
        timeout: seconds without an answer after which it is lost.
    """

    def __init__(self, url: str, token: str, timeout: float) -> None:
        self.url = url.rstrip("/")
        self.facts: Facts = {}
        """What it must have in common with the run, once that is known."""
        self.precision = ""
        """Of its shadow, once it has answered."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._pool = PoolManager(maxsize=REQUESTS, headers=headers, socket_options=_ALIVE, retries=False)
        self._timeout = timeout
        self._weights: str | None = None  # identity of those it has
        self._pushing = threading.Lock()

    def check(self) -> None:
        """Raises `Lost` if the explorer does not answer, ``UserError`` if it has another token or other options."""
        status, content = self._ask("GET", "/health", timeout=_CONNECT)
        if status == 401:
            raise UserError(
                f"explorers.urls={self.url} is invalid: the explorer has another token. Set its token here with export "
                f"{TOKEN}=<token>."
            )
        try:
            facts = read_facts(content)
        except ValueError as error:
            raise Lost(f"it is no explorer; it answered with status {status}: {shown(content)}") from error
        self.precision = str(facts.get(PRECISION))
        if differing := differences(facts, self.facts):
            raise UserError(
                f"explorers.urls={self.url} is invalid: {differing[0]}. Start it with the options of this run and "
                "task=explore."
            )

    def sample(self, request: Request, identity: str, weights: bytes) -> bytes:
        """Return the message with the answer to ``request``, sampled with ``weights``.

        Raises:
            Lost: the explorer does not answer, or has other options.
            ServerError: it has answered that it cannot sample it, or with these weights.
        """
        body = messages.pack_request(request, identity)
        for _ in range(2):  # an explorer that was started again has no weights
            self._push(identity, weights)
            status, content = self._ask("POST", "/sample", body)
            if status != 409:
                break
            self._weights = None
        if status == 200:
            return content
        if status == 422:
            raise ServerError(f"the explorer {self.url} cannot sample: {shown(content)}")
        raise Lost(f"it answered with status {status}: {shown(content)}")

    def _push(self, identity: str, weights: bytes) -> None:
        with self._pushing:
            if self._weights == identity:
                return
            if self._weights is None:
                try:
                    self.check()
                except UserError as error:
                    raise Lost(str(error)) from error
            status, content = self._ask("PUT", f"/weights/{identity}", weights)
            if status == 422:
                raise ServerError(f"the explorer {self.url} cannot take the weights: {shown(content)}")
            if status != 200:
                raise Lost(f"it answered to the weights with status {status}: {shown(content)}")
            self._weights = identity

    def _ask(
        self, method: str, path: str, body: bytes | None = None, timeout: float | None = None
    ) -> tuple[int, bytes]:
        seconds = timeout or self._timeout
        try:
            answer = self._pool.request(method, self.url + path, body=body, redirect=False, timeout=seconds)
        except HTTPError as error:
            self._weights = None
            raise Lost(sentence(error)) from error
        return answer.status, answer.data


class Task:
    """A chunk and its answer."""

    def __init__(self, request: Callable[[], Request], index: Tensor) -> None:
        self.request, self.index = request, index
        self.cancelled = False
        self.answer: bytes | None = None
        self.version: int | None = None  # of the weights of the answer
        self.error: Exception | None = None


class Fleet:
    """The explorers of a run, each with threads that send it one chunk after another.

    Args:
        connections: to the explorers.
        max_lag: iterations by which the weights of an answer may be older than those of the last `sync`.
        timeout: seconds without any answer after which `result` raises.
    """

    def __init__(self, connections: Sequence[Connection], max_lag: int, timeout: float) -> None:
        self.max_lag, self._timeout = max_lag, timeout
        self._waiting: deque[Task] = deque()
        self._changed = threading.Condition()
        self._version: int | None = None
        self._weights = ("", b"")
        self._last_answer = 0.0  # time.monotonic
        self._complaints: dict[str, str] = {}  # of lost explorers
        for connection in connections:
            for _ in range(REQUESTS):
                threading.Thread(target=self._work, args=[connection], daemon=True, name="explorer").start()

    def sync(self, state: State, version: int) -> None:
        """Send chunks with the adapter weights ``state`` from now on."""
        if version != self._version:
            weights = messages.pack_weights(state)
            with self._changed:
                self._version, self._weights = version, weights

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue chunks."""
        with self._changed:
            self._waiting.extend(tasks)
            self._changed.notify_all()

    def cancel(self, tasks: Sequence[Task]) -> None:
        """Let no explorer begin these chunks."""
        for task in tasks:
            task.cancelled = True

    def result(self, task: Task) -> bytes:
        """Wait for the answer to a queued chunk, which is sampled again if its weights are too old.

        Raises:
            ServerError: an explorer cannot sample it, or none has answered for ``timeout`` seconds.
            Exception: whatever else has stopped the thread that sent it.
        """
        with self._changed:
            begin = time.monotonic()
            while True:
                if task.error is not None:
                    raise task.error
                if task.answer is not None:
                    if self.lag(task) <= self.max_lag:
                        return task.answer
                    task.answer = None
                    self._waiting.appendleft(task)
                    self._changed.notify_all()
                silent = time.monotonic() - max(self._last_answer, begin)
                if silent > self._timeout:
                    why = next(iter(self._complaints.values()), "they are silent")
                    raise ServerError(f"no explorer of explorers.urls has answered for {silent:.0f} s: {why}")
                self._changed.wait(1.0)

    def lag(self, task: Task) -> int:
        """Return by how many iterations the weights of an answer are older than those of the last `sync`."""
        assert self._version is not None and task.version is not None, "sync precedes sampling"
        return self._version - task.version

    def _work(self, connection: Connection) -> None:
        """Send chunks to an explorer for as long as the process lives; the thread of one request."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                task = self._waiting.popleft()
                version, weights = self._version, self._weights
            if task.cancelled:
                continue
            try:
                answer = connection.sample(task.request(), *weights)
            except Lost as error:
                self._lose(connection, task, str(error))
                time.sleep(_AGAIN)
                continue
            except Exception as error:  # is raised where the answer is awaited, not in this thread
                task.error = error
            with self._changed:
                if task.error is None:
                    task.answer, task.version = answer, version
                    if self._complaints.pop(connection.url, None):
                        log.info("the explorer %s answers again", connection.url)
                self._last_answer = time.monotonic()
                self._changed.notify_all()

    def _lose(self, connection: Connection, task: Task, why: str) -> None:
        with self._changed:
            self._waiting.appendleft(task)
            if connection.url not in self._complaints:
                log.warning("the explorer %s is lost: %s Its candidates go to another.", connection.url, why)
            self._complaints[connection.url] = why
            self._changed.notify_all()


class RemoteSampler:
    """Sends the chunks of a stage to a fleet.

    Args:
        policy: architecture; its device gets the answers.
        batch_size: candidates in a request.
        name: of the explorers' sampler, as in `Stage.sampler`.
        fleet: the explorers.
        precision: of the explorers' shadows, as text.
    """

    def __init__(
        self,
        policy: PipelineAdapter,
        batch_size: BatchSize,
        name: str,
        fleet: Fleet,
        precision: str = "",
    ) -> None:
        self.policy, self.batch_size, self.name, self.fleet = policy, batch_size, name, fleet
        self.precision = precision
        self.version: int | None = None
        self.lags: list[int] = []
        """Of the chunks since the last `sync`: iterations by which their weights were older."""
        self._ahead: dict[bytes, list[Task]] = {}  # by the seeds

    def sync(self, state: State, version: int | None) -> None:
        """Sample with ``state`` from now on."""
        assert version is not None, "explorers sample with the old policy"
        self.fleet.sync(state, version)
        self.version, self.lags = version, []

    def explore_ahead(self, prompts: EncodedPrompts, seeds: Tensor, spec: SamplingSpec) -> None:
        """Begin chunks that a later `sample` of the same seeds takes, if their weights are not too old by then."""
        key = seeds.numpy().tobytes()
        if key not in self._ahead:
            self._ahead[key] = self._tasks(prompts, seeds, spec)
            self.fleet.submit(self._ahead[key])

    def sample(self, prompts: EncodedPrompts, seeds: Tensor, spec: SamplingSpec) -> Generator[Chunk, None, None]:
        """Yield the sampled and scored chunks of seeds [P, N], in their order.

        Raises:
            ServerError: see `Fleet.result`.
        """
        tasks = self._ahead.pop(seeds.numpy().tobytes(), None) if spec.initial_state is None else None
        if tasks is None:
            tasks = self._tasks(prompts, seeds, spec)
            self.fleet.submit(tasks)
        try:
            for task in tasks:
                scores, state = messages.unpack_answer(self.fleet.result(task), self.policy.device)
                self.lags.append(self.fleet.lag(task))
                task.answer = b""  # is freed while others are awaited
                yield Chunk(task.index, state, None, scores)
        finally:
            self.fleet.cancel(tasks)

    def _tasks(self, prompts: EncodedPrompts, seeds: Tensor, spec: SamplingSpec) -> list[Task]:
        assert isinstance(spec.solver, str) and not spec.transitions, "exploration records no steps"
        owner = torch.arange(seeds.shape[0]).repeat_interleave(seeds.shape[1])

        def request(index: Tensor) -> Request:
            rows, places = owner[index].unique(return_inverse=True)
            part = prompts.gather(rows)
            state = spec.initial_state
            if state is not None:
                state = map_tensors(lambda tensor: tensor.flatten(0, 1)[index.to(tensor.device)], state)
            return Request(self.name, part, places, seeds.flatten()[index], spec._replace(initial_state=state))

        return [
            Task(partial(request, index), index) for index in torch.arange(seeds.numel()).split(self.batch_size.size)
        ]
