"""Samples and scores candidates by explorers: seeds are sent; scores come back, and latents if a stage continues.

A *chunk*, as many candidates as a forward pass takes, is a call of an actor, so equal machines give equal bits, whoever
answers. Its weights are as of its submission: what is explored ahead has the present ones, which are older by then.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from torch import Tensor

from solrl_lightning.errors import ExplorersLost
from solrl_lightning.explorers.actor import moved
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
"""Seconds in which one explorer must answer, some of them to get a place in the cluster and to load a model."""

PoolOf = Callable[[int], tuple[EncodedPrompts, Tensor]]
"""Iteration -> its encoded prompts P and seeds [P, N]."""


@dataclass
class Task:
    """A chunk on its way."""

    places: Tensor  # int64 [B], indices into the flattened seeds
    arguments: tuple[Any, ...]  # of `Explorer.sample`
    answer: Any = None


class RaySampler:
    """Sends the chunks of a stage to explorers, actors of `Explorer`; raises as ``sample``."""

    def __init__(self, cfg: Run, explorers: list[Any], model: PipelineAdapter, pool_of: PoolOf) -> None:
        self.model, self._pool_of, self._explorers, self._cfg = model, pool_of, explorers, cfg
        self.batch_size = BatchSize(cfg.explorers.rollout_batch or cfg.model.rollout_batch, pad_to_size=False)
        self.version: int | None = None
        self.costs: Counter[str] = Counter()
        self._last = cfg.family.stages(model.sigmas)[-2].end  # of exploration
        self._ahead: dict[int, tuple[int, list[Task]]] = {}  # iteration -> lag and chunks
        self._waiting: deque[Task] = deque()
        self._sent: list[dict[ray.ObjectRef, Task | None]]  # to each explorer: a chunk, or None: `ready`
        self._sent = [{explorer.ready.remote(): None} for explorer in explorers]
        self._answering: set[int] = set()  # explorers
        self._last_words = "the cluster has no room for explorers.resources, or their models take longer to load."
        while not self._answering:
            self._receive()

    def metrics(self) -> dict[str, float]:
        """Return how many explorers answer and, since the last `sync`, lag, seconds, and how often one was lost."""
        return {"explorers": len(self._answering), **self._counts}

    def sync(self, state: State, version: int | None) -> None:
        """Sample with ``state`` from now on."""
        assert version is not None, "explorers sample with the old policy"
        self.version, self._weights = version, [ray.put(moved(state, "cpu"))]
        self._counts: dict[str, float] = {"lag": 0, "explorer_seconds": 0, "explorers_lost": 0}
        for number in self._answering:  # fails if it is lost, even without a chunk
            self._sent[number][self._explorers[number].ready.options(max_task_retries=0).remote()] = None

    def sample(
        self,
        stage: Stage,
        prompts: EncodedPrompts,
        seeds: Tensor,
        initial_state: SolverState | None = None,
    ) -> Generator[Chunk, None, None]:
        """Yield the sampled and scored chunks of seeds [P, N], in their order.

        Raises:
            ExplorersLost: no explorer answers for `PATIENCE`, or none can be started again.
        """
        assert self.version is not None and not stage.transitions, "exploration records no steps"
        if initial_state is None:
            self._first = stage
        if self.version not in self._ahead:
            self._ahead[self.version] = 0, self._submit(stage, prompts, seeds, initial_state)
        lag, tasks = self._ahead.pop(self.version)
        self._counts["lag"] = max(self._counts["lag"], lag)
        # After the last stage, because explorers take chunks in their order.
        ahead = self._cfg.explorers.max_lag if stage.end == self._last else 0
        for later in range(self.version + 1, min(self.version + 1 + ahead, self._cfg.iterations)):
            if later not in self._ahead:
                self._ahead[later] = later - self.version, self._submit(self._first, *self._pool_of(later), None)
        for task in tasks:
            while task.answer is None:
                self._receive()
            scores, state, seconds, costs = task.answer
            self._counts["explorer_seconds"] += seconds
            self.costs += costs
            yield Chunk(task.places, moved(state, self.model.device), None, scores)
        self._send(len(self._waiting))  # nobody receives during training

    def _submit(self, stage: Stage, prompts: EncodedPrompts, seeds: Tensor, state: SolverState | None) -> list[Task]:
        tasks = []
        for places in torch.arange(seeds.numel()).split(self.batch_size.size):
            used, owner = (places // seeds.shape[1]).unique(return_inverse=True)
            first = map_tensors(lambda tensor: tensor.flatten(0, 1)[places, None], state)  # noqa: B023
            sent = moved((prompts.gather(used), owner, seeds.flatten()[places], stage, first), "cpu")
            tasks.append(Task(places, (self._weights, *sent)))
        self._waiting.extend(tasks)
        return tasks

    def _send(self, most: int) -> None:
        """Send what waits to the explorers that have the fewest chunks, up to ``most`` to one."""
        while self._waiting and self._answering:
            number = min(self._answering, key=lambda each: len(self._sent[each]))
            if len(self._sent[number]) >= most:
                return
            task = self._waiting.popleft()
            self._sent[number][self._explorers[number].sample.remote(*task.arguments)] = task

    def _receive(self) -> None:
        """Take an answer, after what waits is sent."""
        self._send(REQUESTS)
        requests = [*chain(*self._sent)]
        done, _ = ray.wait(requests, timeout=PATIENCE) if requests else ([], [])
        if not done:
            raise ExplorersLost(f"no explorer answers: {self._last_words}")
        number, sent = next(each for each in enumerate(self._sent) if done[0] in each[1])
        try:
            answer = ray.get(done[0])
        except RayTaskError as error:
            raise error.cause from error
        except (RayActorError, ObjectLostError) as error:
            self._last_words = str(error).splitlines()[-1]
            self._waiting.extendleft(filter(None, sent.values()))
            sent.clear()  # the others fail, too
            if number not in self._answering:
                log.warning("explorer %d cannot start: %s", number, self._last_words)
                return
            log.warning("explorer %d is lost, and others get its candidates: %s", number, self._last_words)
            self._answering.remove(number)
            self._counts["explorers_lost"] += 1
            sent[self._explorers[number].ready.remote()] = None  # once Ray has started it again
        else:
            task = sent.pop(done[0])
            if task is None:
                self.precision: str = answer
                self._answering.add(number)
            else:
                task.answer = answer
