"""Samples and scores candidates by explorers: seeds are sent; scores come back, and latents if a stage continues.

A *chunk*, as many candidates as a forward pass takes, is a call of an actor, so equal machines give equal bits, whoever
answers. Its weights are those of its submission: what is explored ahead has the present ones, which are older by then.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
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


@dataclass(eq=False)
class Task:
    """A chunk on its way."""

    places: Tensor  # int64 [B], indices into the flattened seeds
    version: int  # of the weights
    arguments: tuple[Any, ...]  # of `Explorer.sample`
    answer: Any = None


class RaySampler:
    """Sends the chunks of a stage to explorers, actors of `Explorer`; raises as ``sample``."""

    def __init__(self, cfg: Run, explorers: list[Any], model: PipelineAdapter, pool_of: PoolOf) -> None:
        self.model, self._pool_of, self._explorers, self._cfg = model, pool_of, explorers, cfg
        self.batch_size = BatchSize(cfg.explorers.rollout_batch or cfg.model.rollout_batch, pad_to_size=False)
        self.version: int | None = None
        self._last = cfg.family.stages(model.sigmas)[-2].end  # of exploration
        self._ahead: dict[int, list[Task]] = {}  # by iteration
        self._waiting: deque[Task] = deque()
        self._sent: dict[ray.ObjectRef, tuple[int, Task | None]] = {  # a chunk, or None: `ready`
            explorer.ready.remote(): (number, None) for number, explorer in enumerate(explorers)
        }
        self._answering: set[int] = set()  # explorers
        self._last_words = "the cluster has no room for explorers.resources, or their models take longer to load."
        self._lag, self._seconds, self._lost = 0, 0.0, 0  # since the last sync
        self._receive_until(lambda: self._answering)

    def metrics(self) -> dict[str, float]:
        """Return, since the last `sync`: lag, explorers that answer, their seconds, and how often one was lost."""
        lag, answering = self._lag, len(self._answering)
        return {"lag": lag, "explorers": answering, "explorer_seconds": self._seconds, "explorers_lost": self._lost}

    def sync(self, state: State, version: int | None) -> None:
        """Sample with ``state`` from now on."""
        assert version is not None, "explorers sample with the old policy"
        self.version, self._weights = version, [ray.put(moved(state, "cpu"))]
        self._lag, self._seconds, self._lost = 0, 0.0, 0

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
        tasks = self._ahead.pop(self.version, None) or self._submit(self.version, stage, prompts, seeds, initial_state)
        # After the last stage, because explorers take chunks in their order.
        ahead = self._cfg.explorers.max_lag if stage.end == self._last else 0
        for later in range(self.version + 1, min(self.version + 1 + ahead, self._cfg.iterations)):
            if later not in self._ahead:
                self._ahead[later] = self._submit(self.version, self._first, *self._pool_of(later), None)
        for task in tasks:
            self._receive_until(lambda: task.answer)  # noqa: B023
            scores, state, seconds = task.answer
            self._lag = max(self._lag, self.version - task.version)
            self._seconds += seconds
            yield Chunk(task.places, moved(state, self.model.device), None, scores)
        self._send(len(self._waiting))  # nobody receives during training

    def _submit(
        self, version: int, stage: Stage, prompts: EncodedPrompts, seeds: Tensor, state: SolverState | None
    ) -> list[Task]:
        tasks = []
        for places in torch.arange(seeds.numel()).split(self.batch_size.size):
            used, owner = (places // seeds.shape[1]).unique(return_inverse=True)
            first = map_tensors(lambda tensor: tensor.flatten(0, 1)[places, None], state)  # noqa: B023
            sent = moved((prompts.gather(used), owner, seeds.flatten()[places], stage, first), "cpu")
            tasks.append(Task(places, version, (self._weights, *sent)))
        self._waiting.extend(tasks)
        return tasks

    def _send(self, most: int) -> None:
        """Send what waits to the explorers that have the fewest chunks, up to ``most`` to one."""
        counts = Counter(number for number, _ in self._sent.values())
        while self._waiting and self._answering:
            number = min(self._answering, key=counts.__getitem__)
            if counts[number] >= most:
                return
            task = self._waiting.popleft()
            self._sent[self._explorers[number].sample.remote(*task.arguments)] = number, task
            counts[number] += 1

    def _receive_until(self, met: Callable[[], Any]) -> None:
        while not met():
            self._send(REQUESTS)
            done, _ = ray.wait([*self._sent], timeout=PATIENCE) if self._sent else ([], [])
            if not done:
                raise ExplorersLost(f"no explorer answers: {self._last_words}")
            number, task = self._sent.pop(done[0])
            try:
                answer = ray.get(done[0])
            except RayTaskError as error:
                raise error.cause from error
            except (RayActorError, ObjectLostError) as error:
                self._last_words = str(error).splitlines()[-1]
                if task is None:
                    log.warning("explorer %d cannot start: %s", number, self._last_words)
                    continue
                log.warning("explorer %d is lost, and others get its candidates: %s", number, self._last_words)
                others = {sent: other for sent, (its, other) in self._sent.items() if its == number and other}
                for sent in others:  # which fail, too
                    del self._sent[sent]
                self._waiting.extendleft([task, *others.values()])
                self._answering.remove(number)
                self._lost += 1
                self._sent[self._explorers[number].ready.remote()] = number, None  # once Ray has started it again
            else:
                if task is None:
                    self.precision: str = answer
                    self._answering.add(number)
                else:
                    task.answer = answer
