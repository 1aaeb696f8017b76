"""The explorer: an actor with a module of its own, built from the run's configuration.

torch is loaded with the module, after the actor has its place in the cluster. Shapes: B chunk, P prompts.
"""

import os
import time
from contextlib import suppress
from functools import cached_property, lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from solrl_lightning import __version__
from solrl_lightning.cli.console import silence_libraries
from solrl_lightning.errors import UserError
from solrl_lightning.machine import allocator
from solrl_lightning.options.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from solrl_lightning.rollout.stage import Stage
    from solrl_lightning.sampling import SolverState
    from solrl_lightning.training.module import SolRLModule


class Answer(NamedTuple):
    """A sampled and scored chunk, on the CPU."""

    scores: "Tensor"  # float32 [B, R]
    state: "SolverState | None"  # [B, ...]; None if the stage is without states
    seconds: float  # of the explorer


class Explorer:
    """Samples and scores chunks; one is sampled while the one before is scored.

    Args:
        cfg: options of the run.
        version: of this package there.
        folder: working directory of the run, for relative paths.
    """

    def __init__(self, cfg: Run, version: str, folder: str) -> None:
        if version != __version__:
            node = ray.util.get_node_ip_address()
            raise UserError(
                f"explorers.address is invalid: solrl-lightning is {__version__} on {node}, and {version} in the run. "
                "Install one version on all machines."
            )
        with suppress(FileNotFoundError):
            os.chdir(folder)
        self.cfg, self._turn = cfg, Lock()
        self._weights: ray.ObjectRef | None = None  # that the sampler has
        self._prompts = lru_cache(maxsize=2)(lambda ref: self._moved(ray.get(ref)))

    def place(self) -> None:
        """Answer as soon as the cluster has a place for this actor."""

    def ready(self) -> str:
        """Build the module and return the precision of its shadow; raises what ``build_model`` does."""
        with self._turn:
            return self._module.transformers.precision_backend

    @cached_property
    def _module(self) -> "SolRLModule":
        silence_libraries()
        allocator.configure()
        import torch

        from solrl_lightning.build import build_model, build_rewards

        device = torch.device("cuda", 0) if ray.get_gpu_ids() else torch.device("cpu")  # Ray hides the other GPUs
        cfg = self.cfg
        rewards = build_rewards(cfg.reward, cfg.model.frames, device)
        module = build_model(cfg, device, cfg.family.exploring_samplers, rewards)
        self._submit = module.scoring_worker().__enter__()  # for as long as the process lives
        return module

    def _moved(self, tree: Any) -> Any:
        from solrl_lightning.sampling.state import map_tensors

        return map_tensors(lambda tensor: tensor.to(self._module.policy.device), tree)

    def sample(
        self,
        sampler: str,
        weights: "list[ray.ObjectRef]",
        prompts: "list[ray.ObjectRef]",
        owner: "Tensor",
        seeds: "Tensor",
        stage: "Stage",
        initial_state: "SolverState | None",
    ) -> Answer:
        """Return seeds [B] of the prompts ``owner`` [B], sampled by trained weights of the object store, and scored."""
        import torch

        from solrl_lightning.rollout.chunks import score_images
        from solrl_lightning.sampling.state import concatenate, map_tensors

        with torch.no_grad(), self._turn:
            start, module = time.perf_counter(), self._module
            samples = module.transformers.samplers[sampler]
            if self._weights != weights[0]:
                samples.sync(self._moved(ray.get(weights[0])), None)
                (self._weights,) = weights
            encoded = self._prompts(prompts[0]).gather(owner)
            first = map_tensors(lambda tensor: tensor[:, None], self._moved(initial_state))
            chunks = samples.sample(encoded, seeds[:, None], stage, first)
            state: Any = concatenate([chunk.state for chunk in chunks])
            decode, rewards = module.decoder(stage.decoder), module.rewards.for_training
            scores = self._submit(lambda: score_images(decode, rewards, state.x0, encoded.prompts, seeds, or_nan=True))
            seconds = time.perf_counter() - start
        answer = Answer(scores.result(), state if stage.with_states else None, seconds)
        return map_tensors(lambda tensor: tensor.cpu(), answer)
