"""Records of an iteration.

Shapes: P prompts of this rank, N candidates of each, K kept, R rewards, T solver steps, B micro-batch.
"""

from typing import NamedTuple

from torch import Tensor

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.rollout.select import take
from solrl_lightning.sampling.state import RecordedSteps, SolverState, map_tensors


class EncodedPrompts(NamedTuple):
    """P prompts with their embeddings."""

    prompts: list[Prompt]
    conditioning: dict[str, Tensor]  # each [P, ...]

    def gather(self, index: Tensor) -> "EncodedPrompts":
        """Return the prompts ``index`` [B], which may repeat."""
        conditioning = {name: value[index.to(value.device)] for name, value in self.conditioning.items()}
        return EncodedPrompts([self.prompts[i] for i in index.tolist()], conditioning)


class Candidates(NamedTuple):
    """Sampled seeds with their rewards and solver state."""

    seeds: Tensor  # [P, N] int64
    state: SolverState | None  # [P, N, ...] float32; after an early stop x is noisy and x0 a prediction; None: dropped
    rewards: Tensor  # [P, N] float32, the weighted sum of `scores`
    scores: Tensor  # [P, N, R] float32, one value per reward
    merits: Tensor  # [P, N] float32, by which selection ranks a prompt's candidates; see `WeightedRewards.merits`
    recorded_steps: RecordedSteps | None = None  # S steps: x [P, N, S + 1, ...], log_probs [P, N, S]

    @property
    def x0(self) -> Tensor:
        """Image latents [P, N, ...] in float32, predicted ones after an early stop."""
        assert self.state is not None and self.state.x0 is not None, "a stage takes at least one step"
        return self.state.x0

    def take(self, chosen: Tensor) -> "Candidates":
        """Return the candidates ``chosen`` [P, K] of each prompt."""
        return map_tensors(lambda values: take(values, chosen), self)


class Rollouts(NamedTuple):
    """Training samples of an iteration."""

    prompts: list[Prompt]  # P
    seeds: Tensor  # [P, K] int64
    x0: Tensor  # [P, K, ...] float32, the image latents
    proxy_merits: Tensor  # [P, K] float32, by which the last selection took them; only rank/kept_* reads them
    rewards: Tensor  # [P, K] float32, of `x0`
    scores: Tensor  # [P, K, R] float32, one value per reward
    advantages: Tensor  # [P, K] float32, computed from the merits of `scores`
    recorded_steps: RecordedSteps | None = None  # as in `Candidates`, of the K samples

    @classmethod
    def of(cls, prompts: list[Prompt], samples: Candidates, proxy_merits: Tensor, advantages: Tensor) -> "Rollouts":
        """Return the ``samples`` of P prompts with their [P, K] proxy merits and advantages."""
        seeds, _, rewards, scores, _, recorded_steps = samples
        return cls(prompts, seeds, samples.x0, proxy_merits, rewards, scores, advantages, recorded_steps)


class TrainingBatch(NamedTuple):
    """Micro-batch of rows; a row is a kept sample at one noise level."""

    x0: Tensor  # [B, ...] float32
    x_t: Tensor  # [B, ...] float32, the input of the transformer
    x_next: Tensor | None  # [B, ...] float32, the sampler's x one step after `x_t`; None without recorded steps
    log_prob: Tensor | None  # [B] float32, of `x_next` given `x_t` as it was sampled; None without a stochastic solver
    step: Tensor  # [B] int64, the solver step i of the noise level
    sigma: Tensor  # [B] float32, sigmas[i]
    sigma_next: Tensor  # [B] float32, sigmas[i + 1]
    advantage: Tensor  # [B] float32
    weight: Tensor  # [B] float32, 0 for padding
    conditioning: dict[str, Tensor]  # each [B, ...]
    prompts: list[Prompt]  # B
    seeds: Tensor  # [B] int64
    optimizer_step: int  # of the iteration, from 0
    real: int  # rows that are no padding, the first of the B

    def first(self, rows: int) -> "TrainingBatch":
        """Return the first ``rows`` rows."""
        return map_tensors(lambda tensor: tensor[:rows], self._replace(prompts=self.prompts[:rows]))
