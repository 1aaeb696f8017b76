"""The explorer: an actor with a module of its own, built from the run's configuration. Shapes: B chunk, R rewards."""

import os
import time
from collections import Counter
from contextlib import suppress
from threading import Lock
from typing import Any

import ray
import torch

from solrl_lightning import __version__
from solrl_lightning.cli.console import silence_libraries
from solrl_lightning.errors import UserError
from solrl_lightning.machine import allocator
from solrl_lightning.options.run import Run
from solrl_lightning.rewards.addresses import TOKEN
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.sampling.state import concatenate, map_tensors


class Explorer:
    """Samples and scores chunks; one is sampled while the one before is scored.

    ``version``: of this package in the run's process; ``folder``: its working directory, for relative paths;
    ``token``: of the servers of rewards.
    """

    def __init__(self, cfg: Run, version: str, folder: str, token: str) -> None:
        if version != __version__:
            node = ray.util.get_node_ip_address()
            raise UserError(f"{node} has solrl-lightning {__version__}, and the run {version}. Install one on both.")
        if token:  # an explorer has the environment of `ray start`
            os.environ[TOKEN] = token
        with suppress(FileNotFoundError):
            os.chdir(folder)
        silence_libraries()  # of what the next line imports
        from solrl_lightning.build import build_model, build_rewards

        allocator.configure()
        self._device = torch.device("cuda", 0) if ray.get_gpu_ids() else torch.device("cpu")  # Ray hides the other GPUs
        rewards = build_rewards(cfg.reward, cfg.model.frames, self._device)
        self._module = build_model(cfg, self._device, cfg.family.exploring_samplers, rewards)
        self._submit = self._module.scoring_worker().__enter__()  # for as long as the process lives
        self._weights: ray.ObjectRef | None = None  # that the sampler has
        self._turn, self._counting = Lock(), Lock()
        self._rewards, self._costs = rewards, Counter[str]()

    @ray.method(max_task_retries=-1)  # as often as Ray starts it again
    def ready(self) -> str:
        """Return the precision of the shadow."""
        return self._module.transformers.precision_backend

    @torch.no_grad()
    def sample(self, weights: list[Any], prompts: Any, owner: Any, seeds: Any, stage: Stage, state: Any) -> Any:
        """Return scores [B, R], states [B, ...], seconds and costs of the seeds [B] of the prompts ``owner`` [B].

        The rewards have these costs since the last answer.

        ``weights``: in the object store, in a list, so that Ray does not read them for every chunk. ``state``:
        [B, 1, ...], or None for the seeds' noise.
        """
        with self._turn:
            start, module = time.perf_counter(), self._module
            sampler = module.transformers.samplers[stage.sampler]
            if self._weights != weights[0]:
                sampler.sync(moved(ray.get(weights[0]), self._device), None)
                (self._weights,) = weights
            encoded = moved(prompts, self._device).gather(owner)
            chunks = sampler.sample(stage, encoded, seeds[:, None], moved(state, self._device))
            state = concatenate([chunk.state for chunk in chunks])
            score, rewards = module.scorer(stage), module.rewards.for_training
            scores = self._submit(lambda: score(rewards, state.x0, encoded.prompts, seeds))
            seconds = time.perf_counter() - start
        scored = scores.result()
        return moved((scored, state if stage.with_states else None, seconds, self._new_costs()), "cpu")

    def _new_costs(self) -> Counter[str]:
        with self._counting:
            costs = Counter(self._rewards.costs)
            new, self._costs = costs - self._costs, costs
        return new


def moved(tree: Any, device: Any) -> Any:
    """Return ``tree`` with its tensors on ``device``."""
    return map_tensors(lambda tensor: tensor.to(device), tree)
