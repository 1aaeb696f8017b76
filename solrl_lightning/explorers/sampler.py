"""Samples and scores candidates by explorers: seeds are sent; scores come back, and latents if a stage continues.

A *chunk*, as many candidates as a forward pass takes, is a call of an actor, so equal machines give equal bits, whoever
answers. Its weights are those of its submission: what is explored ahead has the present ones, which are older by then.

Shapes: B chunk, P prompts, N pool.
"""

import itertools
import logging
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from queue import PriorityQueue
from threading import Thread
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from torch import Tensor

from solrl_lightning.errors import ExplorersLost, sentence
from solrl_lightning.options.run import Run
from solrl_lightning.policies.lora import State
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.rollout.chunks import BatchSize, Chunk
from solrl_lightning.rollout.records import EncodedPrompts
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.sampling import SolverState
from solrl_lightning.sampling.state import map_tensors

log = logging.getLogger(__name__)

REQUESTS = 2
"""To an explorer at the same time: one is computed while the other one travels."""
PATIENCE = 600.0
"""Seconds that an answer is awaited, of which an explorer may need some to start again and to load its model."""


class Task(NamedTuple):
    """A chunk on its way."""

    places: Tensor  # int64 [B], indices into the flattened seeds
    version: int  # of the weights
    arguments: tuple[Any, ...]  # of `Explorer.sample`
    answer: "Future[Any]"


class RaySampler:
    """Sends the chunks of a stage to explorers, actors of `Explorer`; the device of ``model`` gets their answers.

    ``pool_of``: encoded prompts P and seeds [P, N] of an iteration. Raises UserError if a machine of the cluster lacks
    something that the run needs, and ExplorersLost as ``sample``.
    """

    def __init__(
        self,
        cfg: Run,
        explorers: Sequence[Any],
        model: PipelineAdapter,
        pool_of: Callable[[int], tuple[EncodedPrompts, Tensor]],
    ) -> None:
        self.model, self._pool_of = model, pool_of
        self.batch_size = BatchSize(cfg.explorers.rollout_batch or cfg.model.rollout_batch, pad_to_size=False)
        self.version: int | None = None
        self._max_lag, self._last = cfg.explorers.max_lag, cfg.iterations - 1
        self._weights: list[ray.ObjectRef] = []
        self._ahead: dict[bytes, list[Task]] = {}  # by their seeds
        self._queue: PriorityQueue[tuple[int, int, Task]] = PriorityQueue()  # by iteration, then in order
        self._numbers = itertools.count()
        self._answering: set[int] = set()  # numbers of explorers
        self._last_words = "none has started."
        self._lags, self._seconds, self._lost = [0], 0.0, 0  # since the last sync
        first: Future[str] = Future()
        slots = [(number, explorer, first) for number, explorer in enumerate(explorers) for _ in range(REQUESTS)]
        self._threads = [Thread(target=self._work, args=slot, daemon=True) for slot in slots]
        for thread in self._threads:
            thread.start()
        self.precision = self._result(first)

    def metrics(self) -> dict[str, float]:
        """Return, since the last `sync`: lag, explorers that answer, their seconds, and how often one was lost."""
        lag, answering = sum(self._lags) / max(1, len(self._lags)), len(self._answering)
        return {"lag": lag, "explorers": answering, "explorer_seconds": self._seconds, "explorers_lost": self._lost}

    def sync(self, state: State, version: int | None) -> None:
        """Sample with ``state`` from now on."""
        assert version is not None, "explorers sample with the old policy"
        self.version, self._weights = version, [ray.put({name: value.cpu() for name, value in state.items()})]
        self._lags, self._seconds, self._lost = [], 0.0, 0

    def sample(
        self,
        stage: Stage,
        prompts: EncodedPrompts,
        seeds: Tensor,
        initial_state: SolverState | None = None,
        transitions: range = range(0),
    ) -> Generator[Chunk, None, None]:
        """Yield the sampled and scored chunks of seeds [P, N], in their order.

        Raises:
            ExplorersLost: no explorer can be started again, or an answer takes longer than `PATIENCE`.
        """
        assert self.version is not None and not transitions, "exploration records no steps"
        ahead = self._max_lag if initial_state is None else 0  # only of the first stage
        tasks = self._ahead.pop(_key(seeds), None) or self._submit(self.version, stage, prompts, seeds, initial_state)
        for iteration in range(self.version + 1, min(self.version + ahead, self._last) + 1):
            later, seeds_of_later = self._pool_of(iteration)
            if _key(seeds_of_later) not in self._ahead:
                self._ahead[_key(seeds_of_later)] = self._submit(iteration, stage, later, seeds_of_later, None)
        for task in tasks:
            scores, state, seconds = self._result(task.answer)
            self._lags.append(self.version - task.version)
            self._seconds += seconds
            yield Chunk(task.places, map_tensors(lambda tensor: tensor.to(self.model.device), state), None, scores)

    def _submit(
        self, iteration: int, stage: Stage, prompts: EncodedPrompts, seeds: Tensor, initial_state: SolverState | None
    ) -> list[Task]:
        assert self.version is not None, "sync precedes sampling"
        owner = torch.arange(seeds.shape[0]).repeat_interleave(seeds.shape[1])
        sent, states = [ray.put(map_tensors(Tensor.cpu, prompts))], map_tensors(Tensor.cpu, initial_state)
        tasks = []
        for index in torch.arange(seeds.numel()).split(self.batch_size.size):
            state = map_tensors(lambda tensor: tensor.flatten(0, 1)[index], states)  # noqa: B023
            chunk = owner[index], seeds.flatten()[index], stage, state
            tasks.append(Task(index, self.version, (self._weights, sent, *chunk), Future()))
            self._queue.put((iteration, next(self._numbers), tasks[-1]))
        return tasks

    def _result(self, answer: "Future[Any]") -> Any:
        end = time.monotonic() + PATIENCE
        while not wait([answer], timeout=1.0).done:
            if time.monotonic() > end or not any(thread.is_alive() for thread in self._threads):
                raise ExplorersLost(f"no explorer answers: {self._last_words}")
        return answer.result()

    def _work(self, number: int, explorer: Any, first: "Future[Any]") -> None:
        """Send chunks to an explorer for as long as Ray can start it again; the thread of one request."""
        while True:
            answer, item = first, None
            try:
                if number not in self._answering:
                    precision = ray.get(explorer.ready.remote())  # once it has its place and its model
                    self._answering.add(number)
                    with suppress(InvalidStateError):  # another one was first
                        first.set_result(precision)
                item = self._queue.get()
                answer = item[-1].answer
                answer.set_result(ray.get(explorer.sample.remote(*item[-1].arguments)))
            except RayActorError as error:
                if item is not None:
                    self._queue.put(item)
                self._last_words = str(error).splitlines()[-1] if error.actor_init_failed else sentence(error)
                if number in self._answering:
                    self._answering.discard(number)
                    self._lost += 1
                    log.warning("explorer %d is lost, and others get its candidates: %s", number, self._last_words)
                if isinstance(error, ActorDiedError):
                    return  # Ray cannot start it again
            except Exception as error:  # is raised where the answer is awaited
                with suppress(InvalidStateError):
                    answer.set_exception(error.cause if isinstance(error, RayTaskError) else error)
                if item is None:
                    return


def _key(seeds: Tensor) -> bytes:
    return seeds.numpy().tobytes()
