"""The evaluation on held-out prompts: what it measures, and what it has measured so far.

The images of a prompt always start from the same noise, so evaluations are compared prompt by prompt.

Shapes: P held-out prompts, n images per prompt, R scores (every reward and, of several, their weighted sum).
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from solrl_lightning.data.prompt import Prompt, contents, identities
from solrl_lightning.data.prompts import digest
from solrl_lightning.errors import NonFiniteError
from solrl_lightning.metrics.images import STATISTICS, describe, prompt_statistics
from solrl_lightning.names import SolverName
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.chunks import Progress
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.seeds import evaluation_seeds

log = logging.getLogger(__name__)

_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


class Estimate:
    """Progress that also logs, once, how long an evaluation takes as measured here, if it is more than a minute.

    It counts from the end of the first batch, which compiles. A GPU's work is launched ahead of its end by less than
    the seconds that it waits.
    """

    _WAITS = 10.0

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._logged = False

    def __call__(self, progress: Progress, done: int, total: int) -> None:
        """Report that ``done`` images of ``total`` are."""
        progress(done, total)
        now = time.perf_counter()
        if done == 0 or self._logged:
            return
        if self._first is None or done <= self._first[1]:  # the first batch of this evaluation
            self._first = now, done
        elif (seconds := now - self._first[0]) >= self._WAITS:
            self._logged = True
            minutes = seconds / (done - self._first[1]) * total / 60
            if minutes >= 1:
                log.info("an evaluation takes about %.0f minutes here", minutes)


class Evaluation:
    """Scores ``images`` of each held-out prompt by all rewards, and keeps the results of a run."""

    def __init__(
        self,
        prompts: list[Prompt],
        rewards: WeightedRewards,
        solver: SolverName,
        steps: int,
        images: int,
        seed: int,
        model_settings: Mapping[str, Any] = _NO_SETTINGS,
        reward_arguments: Mapping[str, Any] = _NO_SETTINGS,
    ) -> None:
        self.prompts, self.rewards, self.seed = prompts, rewards, seed
        self.model_settings, self.reward_arguments = model_settings, reward_arguments
        self.solver, self.steps, self.images = solver, steps, images
        self.history: list[dict[str, Any]] = []
        """One row per evaluation: iteration, cost so far, and the mean of each score with its errors."""
        self.table: Tensor | None = None
        """Means over each prompt's images in the last evaluation, float64 [P, columns]."""
        self.base: Tensor | None = None
        """Scores of the first evaluation, float64 [P, R]."""
        self.estimate = Estimate()
        self.planned_seconds: float | None = None
        """What one takes by the packaged estimates, if there are any for the model and the GPU."""
        self.comparable = True
        """Whether the evaluations of the checkpoint that was loaded compare with this run's."""

    @property
    def passes(self) -> int:
        """Passes of one image through the solver's steps, without the passes of guidance."""
        return len(self.prompts) * self.images * self.steps

    @property
    def names(self) -> list[str]:
        """Names of the R scores."""
        return list(dict.fromkeys([*self.rewards.rewards, self.rewards.name]))

    @property
    def columns(self) -> list[str]:
        """Columns of ``table``: scores, parts of the rewards, and statistics of the images."""
        parts = (f"eval/{name}" for name in self.rewards.part_names)
        return [*self.names, *parts, *(f"images/{name}" for name in STATISTICS)]

    @property
    def digest(self) -> str:
        """Digest of what is measured: held-out prompts, solver, steps, images, and the rewards with weights."""
        frames = () if self.rewards.frames is None else (self.rewards.frames,)
        sampling = self.solver, self.steps, self.images, *frames
        return digest(contents(self.prompts), sampling, self.columns, dict(self.rewards.weights))

    @property
    def digests(self) -> dict[str, str]:
        """Digests of what else decides the scores: the model's settings of sampling, and the rewards' arguments."""
        return {"sampling": digest(dict(self.model_settings)), "rewards": digest(dict(self.reward_arguments))}

    @property
    def digest_with_noise(self) -> str:
        """Digest of what is measured and of the seed of the noise: evaluations with it and equal `digests` compare."""
        return digest(self.digest, self.seed)

    def scores(self, candidates: Candidates) -> Tensor:
        """Return the scores [P, n, R]."""
        several = len(self.names) > candidates.scores.shape[-1]
        return torch.cat([candidates.scores, candidates.rewards[..., None]], dim=-1) if several else candidates.scores

    def measure(
        self, prompts: list[Prompt], score: Callable[..., Candidates], decode: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the rows of ``table`` for some of the prompts.

        ``score``: see ``SolRLModule.score``; ``decode``: latents -> images, of the model.
        """
        statistics: list[Tensor] = []
        parts: list[Tensor] = []
        of_images = iter([prompt for prompt in prompts for _ in range(self.images)])

        def decode_and_describe(x0: Tensor) -> Tensor:
            images = decode(x0)
            statistics.append(describe(images).cpu())
            parts.append(self.rewards.parts(images, list(islice(of_images, len(images)))).cpu())
            return images

        seeds = evaluation_seeds(self.seed, identities(prompts), self.images)
        candidates = score(prompts, seeds, steps=self.steps, decode=decode_and_describe)
        means = self.scores(candidates).double().nanmean(1)
        of_prompts = prompt_statistics(torch.cat(statistics).unflatten(0, tuple(seeds.shape)))
        mean_parts = torch.cat(parts).double().unflatten(0, tuple(seeds.shape)).mean(1)
        return torch.cat([means, mean_parts.to(means), of_prompts.to(means)], dim=1)

    def means(self) -> dict[str, float]:
        """Return the mean over prompts of each column of ``table``; of a score, over the prompts that ``base`` has.

        A prompt without a score, such as one that a judge refuses, counts with the score of ``base``.

        Raises:
            NonFiniteError: no image has a score.
        """
        assert self.table is not None, "an evaluation has filled it"
        scores, others = self.table.tensor_split([len(self.names)], dim=1)
        means_of(self.names, scores)  # raises if no image has a score, which the scores of the base would hide
        means = means_of(self.names, with_base(scores, self.base))
        means += [float(column.mean()) for column in others.unbind(1)]
        return dict(zip(self.columns, means, strict=True))

    def record(self, iteration: int, cost: Mapping[str, float]) -> dict[str, float]:
        """Add ``table`` to the history and return its means as metrics."""
        assert self.table is not None, "an evaluation has filled it"
        means, scores = self.means(), self.table[:, : len(self.names)]
        rewards = {name: means[name] for name in self.names}
        described = STATISTICS if self.images > 1 else [name for name in STATISTICS if name != "diversity"]
        statistics = {name: means[f"images/{name}"] for name in described}
        if not self.history:
            self.base = scores
        parts = {name: means[f"eval/{name}"] for name in self.rewards.part_names}
        errors = evaluation_errors(self.names, with_base(scores, self.base), self.base)
        row = {"iteration": iteration, **cost, **rewards, "statistics": statistics, **errors}
        self.history.append(row | ({"parts": parts} if parts else {}))
        logged = {f"eval/{name}": mean for name, mean in (rewards | parts).items()}
        return logged | {f"images/{name}": mean for name, mean in statistics.items()}


def with_base(scores: Tensor, base: Tensor | None) -> Tensor:
    """Return scores [P, R] with the scores of ``base`` in place of missing ones; NaN where ``base`` has no score."""
    if base is None or base.shape != scores.shape:
        return scores
    return torch.where(base.isfinite(), torch.where(scores.isfinite(), scores, base), torch.nan)


def evaluation_errors(names: Sequence[str], per_prompt: Tensor, base: Tensor | None) -> dict[str, dict[str, float]]:
    """Return the standard errors over prompts of the means, and of their differences to the base, prompt by prompt.

    ``per_prompt`` and ``base`` are [P, R] with a column for each of ``names``; a prompt without a score is left out.
    Without the errors of a single prompt, and without the differences if ``base`` is None or of other prompts.
    """
    values = {"standard_error": per_prompt}
    if base is not None and base.shape == per_prompt.shape:
        values["change_error"] = per_prompt - base
    errors: dict[str, dict[str, float]] = {}
    for key, table in values.items():
        for name, column in zip(names, table.unbind(1), strict=True):
            scored = column[column.isfinite()]
            if len(scored) > 1:
                errors.setdefault(key, {})[name] = float(scored.std() / len(scored) ** 0.5)
    return errors


def means_of(names: Sequence[str], per_prompt: Tensor) -> list[float]:
    """Return the means of the scores [P, R] of these names over the prompts that have one.

    Raises:
        NonFiniteError: none has.
    """
    means = [float(column.nanmean()) for column in per_prompt.unbind(1)]
    if missing := [name for name, mean in zip(names, means, strict=True) if math.isnan(mean)]:
        which = f"{' and '.join(missing)} reward"  # together: an image has all of its scores or none
        raise NonFiniteError(f"no held-out image has a finite {which}. Correct the reward, or the model.")
    return means
