"""One stage of a rollout: seeds in, latents and rewards out. Exploring and regenerating differ only in who samples.

Candidates are flattened over prompts and sampled in chunks, so pools need not divide into anything. Compiled samplers
get chunks of one fixed size, the last one padded with repetitions, because another size would be another compilation.

Shapes: P prompts, N pool, B chunk, T solver steps.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from peft import LoraConfig
from torch import Tensor, nn

from solrl_lightning.errors import NonFiniteError
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.sampling import integrate

Conditioning = dict[str, Tensor]
Progress = Callable[[int, int], None]


class Policy(Protocol):
    """What a text-to-image architecture offers; see ``solrl_lightning.policies``."""

    transformer: nn.Module
    device: torch.device

    def encode(self, prompts: list[str]) -> Conditioning: ...

    def noise(self, seeds: Tensor) -> Tensor: ...

    def sigmas(self, steps: int) -> Tensor: ...

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor: ...

    def decode(self, x: Tensor) -> Tensor: ...

    def save_lora(self, folder: Path, state: dict[str, Tensor], config: LoraConfig) -> None: ...


class Reward(Protocol):
    """Scores images [B, 3, H, W] in [0, 1] of prompts: float32 [B]."""

    name: str

    def check_prompts(self, prompts: list[str]) -> None: ...  # UserError for one that it cannot score

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor: ...


class Prompts(NamedTuple):
    """P prompts with their embeddings, computed once and indexed by every chunk and step."""

    texts: list[str]
    conditioning: Conditioning  # each [P, ...]

    def rows(self, index: Tensor) -> tuple[list[str], Conditioning]:
        """The prompts ``index`` [B] of a chunk."""
        return (
            [self.texts[i] for i in index.tolist()],
            {name: value[index.to(value.device)] for name, value in self.conditioning.items()},
        )


class Sampler(NamedTuple):
    """How a stage integrates the flow."""

    solver: str
    batch: int
    """Candidates in one forward pass."""
    fixed_batch: bool
    """Pad every chunk to ``batch``, for compiled transformers."""


@torch.no_grad()  # not inference_mode: the latents enter the training graph
def sample_latents(
    policy: Policy, transformer: nn.Module, sampler: Sampler, prompts: Prompts, seeds: Tensor, sigmas: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (flat candidate indices [B], latents [B, ...]) chunk by chunk over seeds [P, N]."""
    count = seeds.numel()
    owner = torch.arange(seeds.shape[0]).repeat_interleave(seeds.shape[1])
    flat = seeds.flatten()
    for first in range(0, count, sampler.batch):
        index = torch.arange(first, min(first + sampler.batch, count))
        padded = index
        if sampler.fixed_batch:
            padded = torch.arange(first, first + sampler.batch).remainder(count)
        _, conditioning = prompts.rows(owner[padded])

        def velocity(x: Tensor, sigma: Tensor, conditioning: Conditioning = conditioning) -> Tensor:
            return policy.velocity(transformer, x, sigma, conditioning)

        latents = integrate(velocity, policy.noise(flat[padded]), sigmas, sampler.solver)
        yield index, latents[: len(index)]


@torch.no_grad()
def run_stage(
    policy: Policy,
    transformer: nn.Module,
    sampler: Sampler,
    reward: Reward,
    prompts: Prompts,
    seeds: Tensor,
    sigmas: Tensor,
    progress: Progress,
) -> Candidates:
    """Samples, decodes and scores every candidate of seeds [P, N].

    Raises:
        NonFiniteError: a reward is NaN or infinite; the message names the prompt and the seed.
    """
    owner = torch.arange(seeds.shape[0]).repeat_interleave(seeds.shape[1])
    latents, rewards = [], []
    progress(0, seeds.numel())
    for index, x0 in sample_latents(policy, transformer, sampler, prompts, seeds, sigmas):
        texts = [prompts.texts[i] for i in owner[index].tolist()]
        score = reward(policy.decode(x0), texts).float()
        check_finite(score, "reward", texts, seeds.flatten()[index])
        latents.append(x0)
        rewards.append(score)
        progress(int(index[-1]) + 1, seeds.numel())
    shape = tuple(seeds.shape)
    return Candidates(seeds, torch.cat(latents).unflatten(0, shape), torch.cat(rewards).unflatten(0, shape))


def check_finite(values: Tensor, what: str, prompts: list[str], seeds: Tensor) -> None:
    """Raises ``NonFiniteError`` for the first of ``values`` [B] that is NaN or infinite."""
    finite = values.isfinite().cpu()
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise NonFiniteError(
            f"the {what} is {float(values[row])} for the prompt {prompts[row]!r} with seed {int(seeds[row])}; training "
            "stops before it does harm. The last checkpoint is intact: look at this prompt with task=generate, then "
            "mend the reward or lower the learning rate."
        )
