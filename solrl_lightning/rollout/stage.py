"""One stage of a rollout: seeds in, latents and rewards out. Exploring and regenerating differ only in who samples.

Candidates are flattened over prompts and sampled in chunks, so pools need not divide into anything. Compiled samplers
get chunks of one fixed size, the last one padded with repetitions, because another size would be another compilation.

Shapes: P prompts, N pool, B chunk, T solver steps.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from peft import LoraConfig
from torch import Tensor, nn

from solrl_lightning.errors import NonFiniteError
from solrl_lightning.memory import retry_with_empty_cache
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.beside import at_once, beside
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.sampling import SolverState, advance, start

log = logging.getLogger(__name__)

Conditioning = dict[str, Tensor]
Progress = Callable[[int, int], None]
Decoder = Callable[[Tensor], Tensor]  # latents [B, ...] -> images [B, 3, H, W] in [0, 1]

_NONFINITE_HINT = (
    "training stopped, and its last checkpoint, if there is one, is intact. Reproduce this with task=generate, then "
    "fix the reward or lower the learning rate."
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

    def preview(self, x: Tensor) -> Tensor: ...

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
class Batching:
    """How many candidates go through the transformer at once."""

    size: int
    """Halved for good when as many do not fit the memory."""
    fixed: bool
    """Pad every chunk to ``size``, for compiled transformers."""

    def halve(self) -> None:
        self.size //= 2
        log.warning("out of memory: sampling goes on with %d candidates in one forward pass", self.size)


class Trajectory(NamedTuple):
    """The way of the candidates through the noise levels, or a part of it."""

    sigmas: Tensor  # [T + 1]
    solver: str
    begin: SolverState | None = None  # [P, N, ...], where to go on from; the seeds' noise if not said
    until: int | None = None  # steps after which to stop; all T if not said


@torch.no_grad()  # not inference_mode: the latents enter the training graph
def sample_states(
    policy: Policy,
    transformer: nn.Module,
    batching: Batching,
    prompts: Prompts,
    seeds: Tensor,
    trajectory: Trajectory,
) -> Iterator[tuple[Tensor, SolverState]]:
    """Yields (flat candidate indices [B], their states [B, ...]) chunk by chunk over seeds [P, N]."""
    count = seeds.numel()
    owner = torch.arange(seeds.shape[0]).repeat_interleave(seeds.shape[1])
    flat = seeds.flatten()

    def integrated(index: Tensor) -> SolverState:
        _, conditioning = prompts.rows(owner[index])
        begin = trajectory.begin
        state = start(policy.noise(flat[index])) if begin is None else begin.flatten().take(index)

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            return policy.velocity(transformer, x, sigma, conditioning)

        return advance(velocity, state, trajectory.sigmas, trajectory.solver, trajectory.until)

    first = 0
    while first < count:
        index = torch.arange(first, min(first + batching.size, count))
        padded = torch.arange(first, first + batching.size).remainder(count) if batching.fixed else index
        state = _unless_out_of_memory(integrated, padded)
        if state is None:
            batching.halve()  # out here, where the failed pass's memory is free again
            continue
        yield index, state.take(torch.arange(len(index)))
        first += len(index)


def _unless_out_of_memory(integrated: Callable[[Tensor], SolverState], index: Tensor) -> SolverState | None:
    try:
        return retry_with_empty_cache(partial(integrated, index))
    except torch.OutOfMemoryError:
        if len(index) == 1:
            raise
        return None


@torch.no_grad()
def run_stage(
    policy: Policy,
    transformer: nn.Module,
    batching: Batching,
    rewards: WeightedRewards,
    prompts: Prompts,
    seeds: Tensor,
    trajectory: Trajectory,
    progress: Progress,
    overlap: bool = False,
    decode: Decoder | None = None,
    only_ranks: bool = False,
) -> Candidates:
    """Samples, decodes and scores every candidate of seeds [P, N]; of a trajectory that stops early, its predicted x0.

    With ``overlap`` a chunk is decoded and scored while the next one is sampled. ``decode`` defaults to the policy's.
    With ``only_ranks`` a candidate whose image or reward is not finite gets NaN scores and a warning.

    Raises:
        NonFiniteError: an image or a reward is NaN or infinite; the message names the prompt and the seed.
    """
    owner, shape = torch.arange(seeds.shape[0]).repeat_interleave(seeds.shape[1]), tuple(seeds.shape)
    score = partial(_scored_or_nan if only_ranks else _scored, decode or policy.decode, rewards)
    latents, standing, scores = [], [], []
    progress(0, seeds.numel())
    with beside(policy.device) if overlap else at_once() as submit:
        for index, state in sample_states(policy, transformer, batching, prompts, seeds, trajectory):
            assert state.x0 is not None  # at least one step was taken
            texts = [prompts.texts[i] for i in owner[index].tolist()]
            scores.append(submit(partial(score, state.x0, texts, seeds.flatten()[index])))
            latents.append(state.x0)
            standing.append(state.x)
            progress(int(index[-1]) + 1, seeds.numel())
        each = torch.cat([scored.result() for scored in scores]).unflatten(0, shape)
    stopped = trajectory.until is not None and trajectory.until < len(trajectory.sigmas) - 1
    x0 = torch.cat(latents).unflatten(0, shape)
    x = torch.cat(standing).unflatten(0, shape) if stopped else x0
    return Candidates(seeds, x0, rewards.total(each), each, x)


def _scored(decode: Decoder, rewards: WeightedRewards, x0: Tensor, texts: list[str], seeds: Tensor) -> Tensor:
    """float32 [B, R] of latents [B, ...]."""
    images = decode(x0)
    try:
        return rewards(images, texts)
    except NonFiniteError as error:
        raise NonFiniteError(f"{error} with seed {int(seeds[error.row])}; {_NONFINITE_HINT}", error.row) from error


def _scored_or_nan(decode: Decoder, rewards: WeightedRewards, x0: Tensor, texts: list[str], seeds: Tensor) -> Tensor:
    """As ``_scored``, but NaN for a candidate that has no finite score."""
    images = decode(x0)
    try:
        return rewards(images, texts)
    except NonFiniteError as error:
        first = f"{error} with seed {int(seeds[error.row])}"
    scores = torch.full((len(texts), len(rewards.rewards)), torch.nan, device=images.device)
    for row, text in enumerate(texts):
        with suppress(NonFiniteError):
            scores[row] = rewards(images[row : row + 1], [text])[0]
    count = int(scores.isnan().any(dim=1).sum())
    log.warning("%d of %d explored candidates have no finite reward and are not selected: %s", count, len(texts), first)
    return scores


def check_selectable(proxy_rewards: Tensor, keep: int, prompts: list[str]) -> None:
    """Raises ``NonFiniteError`` if a row of ``proxy_rewards`` [P, N] has fewer than ``keep`` finite values."""
    finite = proxy_rewards.isfinite().sum(dim=1)
    if (finite < keep).any():
        row = int((finite < keep).nonzero()[0])
        raise NonFiniteError(
            f"{int(finite[row])} of {proxy_rewards.shape[1]} explored candidates have a finite reward for the prompt "
            f"{prompts[row]!r}, fewer than family.keep={keep}; {_NONFINITE_HINT}",
            row,
        )


def check_finite(values: Tensor, what: str, prompts: list[str], seeds: Tensor) -> None:
    """Raises ``NonFiniteError`` for the first of ``values`` [B] that is NaN or infinite."""
    finite = values.isfinite().cpu()
    if not finite.all():
        row = int((~finite).nonzero()[0])
        where = f"the prompt {prompts[row]!r} with seed {int(seeds[row])}"
        raise NonFiniteError(f"the {what} is {float(values[row])} for {where}; {_NONFINITE_HINT}", row)
