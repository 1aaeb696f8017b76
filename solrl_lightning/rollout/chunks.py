"""Sample seeds and score the images, chunk by chunk.

Candidates are flattened over prompts and sampled in chunks. Compiled samplers get chunks of one fixed size, padded with
repeated candidates, because torch.compile recompiles for another size.

Shapes: P prompts, N candidates of each, B chunk, T solver steps, R rewards.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import NonFiniteError
from solrl_lightning.machine.attention import without_gradients
from solrl_lightning.machine.memory import retry_with_empty_cache
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.records import Candidates, EncodedPrompts
from solrl_lightning.rollout.scoring_worker import Submit
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.sampling import RecordedSteps, SolverState, start, steps
from solrl_lightning.sampling.state import concatenate, map_tensors
from solrl_lightning.seeds import step_noise

log = logging.getLogger(__name__)

Result = TypeVar("Result")

Progress = Callable[[int, int], None]
Scorer = Callable[[WeightedRewards, Tensor, list[Prompt], Tensor], Tensor]
"""Rewards, image latents x0 [B, ...], B prompts and seeds [B] -> scores, float32 [B, R]."""

_FIX = "Correct the reward or, if the image has NaN, the model."


@dataclass
class BatchSize:
    """Candidates per forward pass."""

    size: int
    """Halved permanently after an out-of-memory error."""
    pad_to_size: bool
    """Pad every chunk to ``size``, for compiled transformers."""

    def sample(self, chunk: Callable[[], Result]) -> Result:
        """Return ``chunk()``, which is called again with an empty allocator cache if it runs out of memory."""
        return retry_with_empty_cache(chunk)

    def halve(self) -> None:
        self.size //= 2
        log.warning("out of memory: sampling continues with %d candidates in one forward pass", self.size)


class Chunk(NamedTuple):
    """Sampled candidates."""

    places: Tensor  # int64 [B], indices into the flattened seeds
    state: SolverState | None  # [B, ...]; None: an explorer has not sent it
    recorded_steps: RecordedSteps | None
    scores: Tensor | None = None  # float32 [B, R], if they were scored elsewhere


@torch.no_grad()  # autograd does not accept tensors of inference_mode, and training reads the latents
def iter_sampled_chunks(
    model: PipelineAdapter,
    transformer: nn.Module,
    batch_size: BatchSize,
    stage: Stage,
    prompts: EncodedPrompts,
    seeds: Tensor,
    initial_state: SolverState | None = None,
) -> Iterator[Chunk]:
    """Yield the chunks of seeds [P, N] after ``stage``, from its noise or from ``initial_state`` [P, N, ...].

    Halves the batch size after an out-of-memory error.
    """
    count, sigmas, solver, transitions = seeds.numel(), model.sigmas(stage.steps), stage.solver, stage.transitions
    assert solver is not None, "Family.stages sets it"
    owner = torch.arange(seeds.shape[0]).repeat_interleave(seeds.shape[1])
    flat = seeds.flatten()
    starts = seeds[:, :1].expand_as(seeds).flatten() if stage.shared_noise else flat

    def integrate(index: Tensor) -> tuple[SolverState, RecordedSteps | None]:
        _, conditioning = prompts.gather(owner[index])
        if initial_state is None:
            first = start(model.noise(starts[index]))
        else:
            first = map_tensors(lambda tensor: tensor.flatten(0, 1)[index], initial_state)

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            return model.guided_velocity(transformer, x, sigma, conditioning)

        def noise(step: int) -> Tensor | None:
            if step not in transitions:
                return None
            return step_noise(flat[index], step, first.x.shape[1:]).to(first.x.device)

        points = []
        for state in chain([first], steps(velocity, first, sigmas, solver, stage.end, noise)):
            if transitions and transitions.start <= state.step <= transitions.stop:
                points.append(state)
        return state, record(points) if points else None

    done = 0
    while done < count:
        index = torch.arange(done, min(done + batch_size.size, count))
        padded = torch.arange(done, done + batch_size.size).remainder(count) if batch_size.pad_to_size else index
        try:
            with without_gradients(model.device):
                state, recorded = batch_size.sample(partial(integrate, padded))
        except torch.OutOfMemoryError:
            if len(padded) == 1:
                raise
            batch_size.halve()
            continue
        yield Chunk(index, *map_tensors(itemgetter(slice(len(index))), (state, recorded)))
        done += len(index)


def record(states: Sequence[SolverState]) -> RecordedSteps:
    """Return the steps between consecutive ``states``."""
    log_probs = [state.log_prob for state in states[1:] if state.log_prob is not None]
    x = torch.stack([state.x for state in states], dim=1)
    return RecordedSteps(states[0].step, x, torch.stack(log_probs, dim=1) if log_probs else None)


@torch.no_grad()
def score_chunks(
    chunks: Iterator[Chunk],
    prompts: EncodedPrompts,
    seeds: Tensor,
    rewards: WeightedRewards,
    score: Scorer,
    progress: Progress,
    worker: Callable[[], AbstractContextManager[Submit[Tensor]]],
    with_states: bool = True,
) -> Candidates:
    """Return the candidates of the ``chunks`` of seeds [P, N], scored in a ``worker`` while later chunks are sampled.

    After an early stop the predicted x0 is scored. Without states, latents are freed once they are scored.
    """
    owner = torch.arange(seeds.shape[0]).repeat_interleave(seeds.shape[1])
    trajectories: list[Any] = []
    scores = []
    progress(0, seeds.numel())
    with worker() as submit:
        for index, state, recorded, scored in chunks:
            if scored is None:
                assert state is not None and state.x0 is not None, "a stage takes at least one step"
                of_rows = [prompts.prompts[i] for i in owner[index].tolist()]
                scores.append(submit(partial(score, rewards, state.x0, of_rows, seeds.flatten()[index])))
            else:
                scores.append(submit(scored.clone))  # after those before it
            trajectories.append((state if with_states else None, recorded))
            progress(int(index[-1]) + 1, seeds.numel())
        each = torch.cat([scored.result() for scored in scores]).unflatten(0, seeds.shape)

    # All chunks have the same numbers of steps and the same None.
    whole, recorded = map_tensors(lambda tensor: tensor.unflatten(0, seeds.shape), concatenate(trajectories))
    if whole is not None and whole.finished:
        whole = whole._replace(x=whole.x0)  # one tensor, as the solver returns it
    return Candidates(seeds, whole, rewards.total(each), each, rewards.merits(each), recorded)


def score_images(
    decode: Callable[[Tensor], Tensor],
    rewards: WeightedRewards,
    x0: Tensor,
    prompts: list[Prompt],
    seeds: Tensor,
    nan_images: bool = False,
) -> Tensor:
    """Return float32 [B, R] of latents [B, ...]; NaN and a warning for an image without a finite reward.

    Raises:
        NonFiniteError: an image is NaN, without ``nan_images``; the message names the prompt and the seed.
    """
    images = decode(x0)
    scores, error = rewards.of_each(images, prompts)
    if error is None:
        return scores
    first = f"{error} with seed {int(seeds[error.row])}"
    if not nan_images and images.isnan().any():
        raise NonFiniteError(f"{first}. {_FIX}", error.row) from error
    missing = scores.isnan()
    if missing.all(dim=1).any():
        message = "%d of %d images have no finite reward and do not count: %s"
        log.warning(message, int(missing.all(dim=1).sum()), len(prompts), first)
    else:
        message = "%d of %d images do not count for a reward of weight 0: %s"
        log.warning(message, int(missing.any(dim=1).sum()), len(prompts), first)
    return scores


def fill_missing(candidates: Candidates, prompts: list[Prompt]) -> Candidates:
    """Return candidates [P, N] in which one without a finite reward has the means of its prompt's others.

    Raises:
        NonFiniteError: a prompt has no candidate with a finite reward.
    """
    check_finite_merits(candidates.merits, 1, prompts)
    finite = candidates.merits.isfinite()

    def filled(values: Tensor) -> Tensor:
        present = finite.view(*finite.shape, *[1] * (values.ndim - 2))
        return values.where(present, values.where(present, torch.nan).nanmean(dim=1, keepdim=True))

    _, _, rewards, scores, merits, _ = candidates
    return candidates._replace(rewards=filled(rewards), scores=filled(scores), merits=filled(merits))


def check_finite_merits(merits: Tensor, count: int, prompts: list[Prompt]) -> None:
    """Raise NonFiniteError if a row of ``merits`` [P, N] has fewer than ``count`` finite values."""
    finite = merits.isfinite().sum(dim=1)
    if (finite < count).any():
        row = int((finite < count).nonzero()[0])
        raise NonFiniteError(
            f"{int(finite[row])} of {merits.shape[1]} candidates have a finite reward for the prompt "
            f"{prompts[row].identity!r}, fewer than the {count} that are needed. A new run can leave the "
            f"prompt out of data.train, and an audit out of data.eval. {_FIX}",
            row,
        )


def check_finite(values: Tensor, what: str, prompts: list[Prompt], seeds: Tensor) -> None:
    """Raise NonFiniteError for the first of ``values`` [B] that is NaN or infinite."""
    finite = values.isfinite().cpu()
    if not finite.all():
        row = int((~finite).nonzero()[0])
        where = f"the prompt {prompts[row].identity!r} with seed {int(seeds[row])}"
        fix = "Correct the objective, or lower optimizer.lr."
        raise NonFiniteError(f"the {what} is {float(values[row])} for {where}. {fix}", row)
