"""The explorer: an actor with a module of its own, built from the run's configuration.

torch is loaded with the module, after the actor has its place in the cluster. Shapes: B chunk, R rewards.
"""

import os
import time
from contextlib import suppress
from functools import cached_property
from threading import Lock
from typing import Any

import ray

from solrl_lightning import __version__
from solrl_lightning.cli.console import silence_libraries
from solrl_lightning.errors import UserError
from solrl_lightning.machine import allocator
from solrl_lightning.options.run import Run
from solrl_lightning.rollout.stage import Stage


class Explorer:
    """Samples and scores chunks; one is sampled while the one before is scored.

    ``version``: of this package in the run's process; ``folder``: its working directory, for relative paths.
    """

    def __init__(self, cfg: Run, version: str, folder: str) -> None:
        if version != __version__:
            raise UserError(
                f"explorers.address is invalid: the version of solrl-lightning is {__version__} on "
                f"{ray.util.get_node_ip_address()}, and {version} in the run. Install one version on all machines."
            )
        with suppress(FileNotFoundError):
            os.chdir(folder)
        self.cfg, self._turn = cfg, Lock()
        self._weights: ray.ObjectRef | None = None  # that the sampler has

    @ray.method(max_task_retries=-1)  # as often as Ray starts it again
    def ready(self) -> str:
        """Build the module, and return the precision of its shadow; raises what ``build_model`` does."""
        with self._turn:
            return self._module.transformers.precision_backend

    @cached_property
    def _module(self) -> Any:
        silence_libraries()
        allocator.configure()
        import torch

        from solrl_lightning.build import build_model, build_rewards

        device = torch.device("cuda", 0) if ray.get_gpu_ids() else torch.device("cpu")  # Ray hides the other GPUs
        rewards = build_rewards(self.cfg.reward, self.cfg.model.frames, device)
        module = build_model(self.cfg, device, self.cfg.family.exploring_samplers, rewards)
        self._submit = module.scoring_worker().__enter__()  # for as long as the process lives
        return module

    def _moved(self, tree: Any, device: Any = None) -> Any:
        from solrl_lightning.sampling.state import map_tensors

        return map_tensors(lambda tensor: tensor.to(device or self._module.model.device), tree)

    def sample(self, weights: list[Any], prompts: Any, owner: Any, seeds: Any, stage: Stage, state: Any) -> Any:
        """Return scores [B, R], states [B, ...] and seconds of the seeds [B] of the prompts ``owner`` [B].

        ``weights``: in the object store, in a list, so that Ray does not read them for every chunk. ``state``:
        [B, ...], or None for the seeds' noise.
        """
        import torch

        from solrl_lightning.sampling.state import concatenate

        with torch.no_grad(), self._turn:
            start, module = time.perf_counter(), self._module
            sampler = module.transformers.samplers[stage.sampler]
            if self._weights != weights[0]:
                sampler.sync(self._moved(ray.get(weights[0])), None)
                (self._weights,) = weights
            encoded = self._moved(prompts).gather(owner)
            first = None if state is None else self._moved(state).take((slice(None), None))
            state = concatenate([chunk.state for chunk in sampler.sample(stage, encoded, seeds[:, None], first)])
            score, rewards = module.scorer(stage), module.rewards.for_training
            scores = self._submit(lambda: score(rewards, state.x0, encoded.prompts, seeds))
            seconds = time.perf_counter() - start
        return self._moved((scores.result(), state if stage.with_states else None, seconds), "cpu")
