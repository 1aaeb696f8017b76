"""The records of an iteration.

Shapes: P prompts of this rank, N pool, K kept, R rewards, T solver steps, B micro-batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from solrl_lightning.rollout.select import take
from solrl_lightning.sampling import SolverState


class EncodedPrompts(NamedTuple):
    """P prompts with their embeddings, computed once and gathered by every chunk and micro-batch."""

    texts: list[str]
    conditioning: dict[str, Tensor]  # each [P, ...]

    def gather(self, index: Tensor) -> tuple[list[str], dict[str, Tensor]]:
        """Return texts and embeddings of the prompts ``index`` [B]."""
        return (
            [self.texts[i] for i in index.tolist()],
            {name: value[index.to(value.device)] for name, value in self.conditioning.items()},
        )


class Candidates(NamedTuple):
    """Generated images of a set of seeds, with their rewards and the solver's state."""

    seeds: Tensor  # [P, N] int64
    state: SolverState  # [P, N, ...] float32; where a stage stops early, x is noisy and x0 a prediction
    rewards: Tensor  # [P, N] float32, the weighted sum of `scores`
    scores: Tensor  # [P, N, R] float32, the value of each reward
    path: Tensor | None = None  # [P, N, T + 1, ...] float32, x at every level; recorded for objectives that read it

    @property
    def x0(self) -> Tensor:
        """[P, N, ...] float32, the image latents, or their prediction where the trajectory was stopped."""
        assert self.state.x0 is not None, "a stage takes at least one step"
        return self.state.x0

    def take(self, chosen: Tensor) -> "Candidates":
        """Return the candidates ``chosen`` [P, K] of each prompt."""
        seeds, state, rewards, scores, path = self
        index = (torch.arange(len(seeds), device=state.x.device)[:, None], chosen.to(state.x.device))
        rest = (take(rewards, chosen), take(scores, chosen), None if path is None else take(path, chosen))
        return Candidates(take(seeds, chosen), state.take(index), *rest)


class Rollouts(NamedTuple):
    """The training samples of an iteration."""

    prompts: list[str]  # P texts
    seeds: Tensor  # [P, K] int64
    x0: Tensor  # [P, K, ...] float32, the image latents
    proxy_rewards: Tensor  # [P, K] float32, by which the samples were selected
    rewards: Tensor  # [P, K] float32, of these very latents
    scores: Tensor  # [P, K, R] float32, of which `rewards` are the weighted sum
    advantages: Tensor  # [P, K] float32, from `rewards` alone
    path: Tensor | None = None  # [P, K, T + 1, ...] float32, x at every level; see `Objective.reads_path`


class TrainingBatch(NamedTuple):
    """One micro-batch of rows; a row is a kept sample at one noise level."""

    x0: Tensor  # [B, ...] float32
    x_t: Tensor  # [B, ...] float32, the input of the transformer
    x_next: Tensor | None  # [B, ...] float32, the sampler's x one step after `x_t`, where the path is recorded
    step: Tensor  # [B] int64, the solver step i of the noise level
    sigma: Tensor  # [B] float32, sigmas[i]
    sigma_next: Tensor  # [B] float32, sigmas[i + 1]
    advantage: Tensor  # [B] float32
    weight: Tensor  # [B] float32, 0 for padding
    conditioning: dict[str, Tensor]  # each [B, ...]
    prompts: list[str]  # B texts
    seeds: Tensor  # [B] int64
