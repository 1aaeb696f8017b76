"""What every reward does around its model: refuse bad input, score in batches of its own, refuse bad scores.

Shapes: B images, U different prompts.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from solrl_lightning.errors import NonFiniteError, UserError


class Reward(ABC):
    """A frozen scorer of images; called as ``reward(images, prompts)``.

    Subclasses say how images and prompts become scores; ``name`` stands in curves, tables and messages.
    """

    name: str

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        """float32 [B] of images [B, 3, H, W] in [0, 1], one prompt each.

        Raises:
            ValueError: the images or the number of prompts are not as said.
            UserError: ``score`` returned something else than one number per image.
            NonFiniteError: an image has NaN, or a score is NaN or infinite.
        """
        check_images(self.name, images, prompts)
        scores = self.score(images, prompts)
        if not isinstance(scores, Tensor) or scores.shape != (len(prompts),):
            found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise UserError(
                f"the reward {self.name} must return one score per image, a tensor [{len(prompts)}]; its score() "
                f"returned {found}."
            )
        scores = scores.float()
        check_scores(self.name, scores, prompts)
        return scores

    @abstractmethod
    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """[B] of images [B, 3, H, W] in [0, 1] that have been checked."""

    def check_prompts(self, prompts: list[str]) -> None:  # noqa: B027  (most rewards can score any text)
        """Raises ``UserError`` for a prompt that cannot be scored."""


def check_images(name: str, images: Tensor, prompts: list[str]) -> None:
    """Raises ``ValueError`` unless images are [B, 3, H, W] floats in [0, 1], one for each of the prompts.

    An image with NaN is a ``NonFiniteError``: the model made it, not the caller.
    """
    if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise ValueError(
            f"the reward {name} scores float images [B, 3, H, W]; got {images.dtype} {list(images.shape)}. Divide "
            "images of uint8 by 255, and stack them with the channels first."
        )
    if len(images) != len(prompts):
        raise ValueError(
            f"the reward {name} takes one prompt per image; got {len(images)} images and {len(prompts)} prompts"
        )
    lowest, highest = images.amin((1, 2, 3)), images.amax((1, 2, 3))  # NaN if there is one
    inside = (lowest >= 0) & (highest <= 1)
    if not inside.all():
        row = int((~inside).nonzero()[0])
        low, high = float(lowest[row]), float(highest[row])
        if math.isnan(low):
            raise NonFiniteError(f"the image given to the reward {name} has NaN for the prompt {prompts[row]!r}", row)
        raise ValueError(
            f"the reward {name} scores images in [0, 1]; image {row} of {len(images)} (prompt {prompts[row]!r}) spans "
            f"{low:.3g} to {high:.3g}. Clamp or rescale what the decoder returns."
        )


def check_scores(name: str, scores: Tensor, prompts: list[str]) -> None:
    """Raises ``NonFiniteError`` for the first of scores [B] that is NaN or infinite."""
    finite = scores.isfinite()
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise NonFiniteError(f"the reward {name} is {float(scores[row])} for the prompt {prompts[row]!r}", row)


def unique_prompts(prompts: list[str]) -> tuple[list[str], Tensor]:
    """The U different prompts, and int64 [B] the place of each prompt among them: a group's text is encoded once."""
    place: dict[str, int] = {}
    index = [place.setdefault(prompt, len(place)) for prompt in prompts]
    return list(place), torch.tensor(index)
