"""One stage of a rollout: seeds in, latents and rewards out. Exploring and regenerating differ only in who samples.

Candidates are flattened over prompts and sampled in chunks, so pools need not divide into anything. Compiled samplers
get chunks of one fixed size, the last one padded with repetitions, because another size would be another compilation.

Shapes: P prompts, N pool, B chunk, T solver steps.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from peft import LoraConfig
from torch import Tensor, nn

from solrl_lightning.errors import NonFiniteError
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.sampling import SolverState, advance, start

log = logging.getLogger(__name__)

Conditioning = dict[str, Tensor]
Progress = Callable[[int, int], None]

_MENDING = (
    "training stops before it does harm. The last checkpoint is intact: look at this prompt with task=generate, then "
    "mend the reward or lower the learning rate."
)


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


@dataclass
class Sampler:
    """How a stage integrates the flow."""

    solver: str
    batch: int
    """Candidates in one forward pass; halved for good when they do not fit the memory."""
    fixed_batch: bool
    """Pad every chunk to ``batch``, for compiled transformers."""

    def halve(self) -> None:
        self.batch //= 2
        log.warning("out of memory: sampling goes on with %d candidates in one forward pass", self.batch)


@torch.no_grad()  # not inference_mode: the latents enter the training graph
def sample_states(
    policy: Policy,
    transformer: nn.Module,
    sampler: Sampler,
    prompts: Prompts,
    seeds: Tensor,
    sigmas: Tensor,
    begin: SolverState | None = None,
    until: int | None = None,
) -> Iterator[tuple[Tensor, SolverState]]:
    """Yields (flat candidate indices [B], their states [B, ...]) chunk by chunk over seeds [P, N].

    Trajectories start from the seeds' noise, or go on from ``begin`` [P, N, ...], and are taken ``until`` that many
    steps, to their end if not said.
    """
    count = seeds.numel()
    owner = torch.arange(seeds.shape[0]).repeat_interleave(seeds.shape[1])
    flat = seeds.flatten()

    def integrated(index: Tensor) -> SolverState:
        _, conditioning = prompts.rows(owner[index])
        state = start(policy.noise(flat[index])) if begin is None else begin.flatten().take(index)

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            return policy.velocity(transformer, x, sigma, conditioning)

        return advance(velocity, state, sigmas, sampler.solver, until)

    first = 0
    while first < count:
        index = torch.arange(first, min(first + sampler.batch, count))
        padded = torch.arange(first, first + sampler.batch).remainder(count) if sampler.fixed_batch else index
        state = _unless_out_of_memory(integrated, padded)
        if state is None:
            sampler.halve()  # out here, where the failed pass's memory is free again
            continue
        yield index, state.take(torch.arange(len(index)))
        first += len(index)


def _unless_out_of_memory(integrated: Callable[[Tensor], SolverState], index: Tensor) -> SolverState | None:
    try:
        return integrated(index)
    except torch.OutOfMemoryError:
        if len(index) == 1:
            raise
        return None


@torch.no_grad()
def run_stage(
    policy: Policy,
    transformer: nn.Module,
    sampler: Sampler,
    rewards: WeightedRewards,
    prompts: Prompts,
    seeds: Tensor,
    sigmas: Tensor,
    progress: Progress,
    begin: SolverState | None = None,
    until: int | None = None,
) -> Candidates:
    """Samples, decodes and scores every candidate of seeds [P, N]; of a trajectory that stops early, its predicted x0.

    ``begin`` and ``until`` are those of ``sample_states``.

    Raises:
        NonFiniteError: an image or a reward is NaN or infinite; the message names the prompt and the seed.
    """
    owner = torch.arange(seeds.shape[0]).repeat_interleave(seeds.shape[1])
    latents, standing, scores = [], [], []
    progress(0, seeds.numel())
    for index, state in sample_states(policy, transformer, sampler, prompts, seeds, sigmas, begin, until):
        assert state.x0 is not None  # at least one step was taken
        texts = [prompts.texts[i] for i in owner[index].tolist()]
        try:
            scores.append(rewards(policy.decode(state.x0), texts))
        except NonFiniteError as error:
            seed = int(seeds.flatten()[index[error.row]])
            raise NonFiniteError(f"{error} with seed {seed}; {_MENDING}", error.row) from error
        latents.append(state.x0)
        standing.append(state.x)
        progress(int(index[-1]) + 1, seeds.numel())
    shape = tuple(seeds.shape)
    stopped = until is not None and until < len(sigmas) - 1
    x0 = torch.cat(latents).unflatten(0, shape)
    each = torch.cat(scores).unflatten(0, shape)
    x = torch.cat(standing).unflatten(0, shape) if stopped else x0
    return Candidates(seeds, x0, rewards.total(each), each, x)


def check_finite(values: Tensor, what: str, prompts: list[str], seeds: Tensor) -> None:
    """Raises ``NonFiniteError`` for the first of ``values`` [B] that is NaN or infinite."""
    finite = values.isfinite().cpu()
    if not finite.all():
        row = int((~finite).nonzero()[0])
        where = f"the prompt {prompts[row]!r} with seed {int(seeds[row])}"
        raise NonFiniteError(f"the {what} is {float(values[row])} for {where}; {_MENDING}", row)
