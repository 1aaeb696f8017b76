"""Several rewards with weights. Every reward is logged; a reward of weight 0 is only evaluated.

What is logged is the weighted sum of raw scores. A prompt's candidates are compared by their *merits*
(`reward.combine`): that sum, as in Flow-GRPO and DiffusionNFT, whose weights must also equalise the scales (ImageReward
spans several units, the others some tenths), or `gdpo`, which does not depend on the scales.

Shapes: B images or videos of F frames, P prompts, N candidates, R rewards.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import NonFiniteError, UserError
from solrl_lightning.frames import choose_frames
from solrl_lightning.names import trained_reward
from solrl_lightning.rewards.base import Metadata, Reward, call_with_metadata, check_scores

Combine = Callable[[Tensor, Tensor], Tensor]
"""Scores [P, N, R] and weights [R] -> merits float32 [P, N]."""

_EQUAL = 1e-6  # std / root mean square of a prompt's scores that differ by rounding only


def weighted_sum(scores: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum [...] of scores [..., R]; a reward of weight 0 is ignored, also where it is NaN."""
    return scores[..., weights != 0] @ weights[weights != 0]


def gdpo(scores: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum [P, N] of scores [P, N, R], each normalised over its prompt's N candidates.

    GDPO (arXiv 2601.05242): (score - mean) / std, with the population standard deviation. Its last step, a
    normalisation over the batch, is part of the advantages. A reward that is constant for a prompt adds 0. A candidate
    without finite scores has NaN and does not count; a reward of weight 0 is ignored.
    """
    scores, weights = scores[..., weights != 0].double(), weights[weights != 0].double()
    finite = scores.isfinite().all(dim=-1, keepdim=True)
    scores, count = scores.where(finite, 0.0), finite.sum(dim=1, keepdim=True)
    centred = (scores - scores.sum(dim=1, keepdim=True) / count).where(finite, 0.0)
    std = (centred.square().sum(dim=1, keepdim=True) / count).sqrt()
    root_mean_square = (scores.square().sum(dim=1, keepdim=True) / count).sqrt()
    merits = (centred / std).where(std > _EQUAL * root_mean_square, 0.0) @ weights
    return merits.where(finite.squeeze(-1), torch.nan).float()


COMBINATIONS: dict[str, Combine] = {"sum": weighted_sum, "gdpo": gdpo}


class WeightedRewards:
    """R rewards by name, with their weights and what combines them.

    ``name`` labels the sum in curves and tables: "weighted_sum", or the name of the only reward if it is to rise.
    ``frames``: which of a video are scored, as in ``choose_frames``.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        weights: Mapping[str, float],
        combine: Combine = weighted_sum,
        frames: str | int | None = None,
    ) -> None:
        self.frames = frames
        self.rewards, self.combine = dict(rewards), combine
        names = Counter([*rewards, *self.part_names, *self.costs])
        if twice := [name for name, count in names.items() if count > 1]:
            raise UserError(
                f"reward is invalid: two rewards, or parts of rewards, have the name {twice[0]} in curves and tables. "
                "Choose another name for one: a part has the name of its reward and one of its part_names."
            )
        self.weights = {name: float(weights[name]) for name in rewards}
        self.name = trained_reward(self.weights)

    @property
    def for_training(self) -> "WeightedRewards":
        """The rewards that rollouts score: all whose weight is not 0."""
        rewards = {name: self.rewards[name] for name, weight in self.weights.items() if weight != 0}
        trained = WeightedRewards(rewards, self.weights, self.combine, self.frames)
        trained.name = self.name
        return trained

    def sign(self, name: str) -> int:
        """Return 1, or -1 for a held-out reward of which less is better: one with a negative weight."""
        return -1 if self.weights.get(name, 0.0) < 0 else 1

    @property
    def costs(self) -> dict[str, int]:
        """`Reward.costs` of all rewards, as <reward>_<kind>."""
        each = ((name, reward.costs.items()) for name, reward in self.rewards.items())
        return {f"{name}_{kind}": count for name, costs in each for kind, count in costs}

    def check_prompts(self, prompts: list[Prompt]) -> None:
        """Raise ``UserError`` for a prompt that one of the rewards cannot score."""
        texts, metadata = _columns(prompts)
        for reward in self.rewards.values():
            call_with_metadata(reward.check_prompts, list(texts), metadata=metadata)

    def try_out(self, image: Tensor, prompt: Prompt) -> None:
        """Let each reward score a grey image [3, H, W] of a prompt, or raise ``UserError``."""
        for reward in self.rewards.values():
            reward.try_out(image, prompt.text, prompt.metadata)

    def __call__(self, images: Tensor, prompts: list[Prompt]) -> Tensor:
        """Return raw scores, float32 [B, R], in the order of ``rewards``; raises as ``Reward.__call__`` does.

        The scores of videos [B, F, 3, H, W] are the means over their ``frames``.
        """
        scores = self._unchecked(images, prompts)
        self._check(scores, prompts)
        return scores

    def of_each(self, images: Tensor, prompts: list[Prompt]) -> tuple[Tensor, NonFiniteError | None]:
        """Return scores as ``__call__`` does, and the error of the first image without a finite score.

        An image without one of a reward with a weight has NaN of all; without one of a reward of weight 0, of that one.
        Only if a reward raises the error, as it does for an image with NaN, is each image scored again, alone.
        """
        try:
            scores = self._unchecked(images, prompts)
        except NonFiniteError as error:
            scores, first = torch.full((len(prompts), len(self.rewards)), torch.nan, device=images.device), error
            for row, prompt in enumerate(prompts):
                with suppress(NonFiniteError):
                    scores[row] = self._unchecked(images[row : row + 1], [prompt])[0]
        else:
            try:
                self._check(scores, prompts)
                return scores, None
            except NonFiniteError as error:
                first = error
        finite = scores.isfinite()
        return scores.where(finite & finite[:, self._weights(scores) != 0].all(-1, keepdim=True), torch.nan), first

    def _unchecked(self, images: Tensor, prompts: list[Prompt]) -> Tensor:
        if images.ndim == 5:
            return self._of_videos(images, prompts)
        texts, metadata = _columns(prompts)
        scores = [reward.unchecked(images, texts, metadata) for reward in self.rewards.values()]
        return torch.stack(scores, dim=-1)

    def _check(self, scores: Tensor, prompts: list[Prompt]) -> None:
        for reward, column in zip(self.rewards.values(), scores.unbind(-1), strict=True):
            check_scores(reward.named_in_errors, column, [prompt.text for prompt in prompts])

    @property
    def part_names(self) -> list[str]:
        """Names of what ``parts`` returns: <reward>_<part>."""
        return [f"{name}_{part}" for name, reward in self.rewards.items() for part in reward.part_names]

    def parts(self, images: Tensor, prompts: list[Prompt]) -> Tensor:
        """Return the rewards' parts of images or videos, float32 [B, len(part_names)]; of a video, its frames' mean.

        Raises as ``Reward.described`` does.
        """
        if images.ndim == 5:
            scored, each = self._frames_of(images, prompts)
            return self.parts(*scored).unflatten(0, (len(images), each)).mean(1)
        texts, metadata = _columns(prompts)
        return torch.cat([reward.described(images, texts, metadata) for reward in self.rewards.values()], dim=1)

    def _of_videos(self, videos: Tensor, prompts: list[Prompt]) -> Tensor:
        scored, each = self._frames_of(videos, prompts)
        try:
            scores = self._unchecked(*scored)
        except NonFiniteError as error:
            raise NonFiniteError(str(error), error.row // each) from error
        return scores.unflatten(0, (len(videos), each)).mean(1)

    def _frames_of(self, videos: Tensor, prompts: list[Prompt]) -> tuple[tuple[Tensor, list[Prompt]], int]:
        """Return the scored frames of videos with their prompts, and their number in each video."""
        scored = choose_frames(videos, "all" if self.frames is None else self.frames)
        each = scored.shape[1]
        return (scored.flatten(0, 1), [prompt for prompt in prompts for _ in range(each)]), each

    def total(self, scores: Tensor) -> Tensor:
        """Return the weighted sum [...] of scores [..., R]."""
        return weighted_sum(scores, self._weights(scores))

    def merits(self, scores: Tensor) -> Tensor:
        """Return what the candidates of a prompt are compared by, float32 [P, N], from their scores [P, N, R]."""
        return self.combine(scores, self._weights(scores))

    def _weights(self, scores: Tensor) -> Tensor:
        return torch.tensor(list(self.weights.values()), dtype=scores.dtype, device=scores.device)


def _columns(prompts: list[Prompt]) -> tuple[list[str], list[Metadata]]:
    """Return the texts and the metadata of prompts."""
    return [prompt.text for prompt in prompts], [prompt.metadata for prompt in prompts]
