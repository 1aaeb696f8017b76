"""Reward base class: validates images, calls ``score``, validates scores.

Shapes: B images, U unique prompts.
"""

import copy
import inspect
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from solrl_lightning.errors import NonFiniteError, RewardError, RewardOutOfMemory, ServerError, UserError, sentence
from solrl_lightning.machine import interrupts
from solrl_lightning.machine.memory import retry_with_empty_cache

T = TypeVar("T")
_NAMED = (UserError, NonFiniteError)  # exceptions of ``score`` that others handle
Metadata = Mapping[str, Any]
"""Keys other than "prompt" of a prompt's row in its source."""


class Reward(ABC):
    """A frozen scorer of images on ``device``, called as ``reward(images, prompts)``.

    Subclasses define ``score(images, prompts)``, or ``score(images, prompts, metadata)`` to read the prompts' metadata.

    Args:
        device: where it scores; the program passes it.
        weight: in the reward to train on; 0: evaluation only.
    """

    name: str = "of your own"  # labels messages
    example: tuple[str, Metadata] = ("a red circle above a blue square", {})
    """A prompt that the reward can score, with its metadata; task=doctor scores an image with it."""
    part_names: tuple[str, ...] = ()
    """Names of what ``parts`` returns; evaluations log the means as ``eval/<reward>_<part>``."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__call__ is not Reward.__call__:
            others = ", ".join(base.__name__ for base in cls.__bases__ if base is not Reward)
            raise TypeError(
                f"{cls.__name__} is called by another __call__ than Reward's, which checks images and scores: define "
                f"score alone, and write class {cls.__name__}(Reward{others and ', '}{others})"
            )

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    @property
    def named_in_errors(self) -> str:
        """How the error of a score that is not finite names the reward."""
        return self.name

    @property
    def costs(self) -> Mapping[str, int]:
        """What all scores so far have cost, by kind; logged as ``reward/<name>_<kind>``, summed over ranks."""
        return {}

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[Metadata] | None = None) -> Tensor:
        """Return ``unchecked`` scores; raise ``NonFiniteError`` if one is NaN or infinite, too."""
        scores = self.unchecked(images, prompts, metadata)
        check_scores(self.named_in_errors, scores, prompts)
        return scores

    @torch.no_grad()
    def unchecked(self, images: Tensor, prompts: list[str], metadata: list[Metadata] | None = None) -> Tensor:
        """Return scores, float32 [B], of images [B, 3, H, W] in [0, 1] with one prompt each and optional metadata.

        NaN or infinite for an image that has no score.

        Raises:
            ValueError: the images have another shape, dtype or range, or the number of prompts or metadata is not B.
            UserError: ``score`` did not return B real numbers: a tensor or array [B] or [B, 1], or a list.
            RewardError: ``score`` raised an exception.
            NonFiniteError: an image has NaN.
        """
        metadata = [{} for _ in prompts] if metadata is None else metadata
        check_images(self.name, images, prompts, metadata)
        returned = self._call(self.score, images, prompts, metadata)
        count = len(prompts)
        shapes = [(count,), (count, 1), ()] if count == 1 else [(count,), (count, 1)]  # of one image, a number
        return numbers_of(self.name, "score", returned, *shapes).flatten().to(images.device)

    @torch.no_grad()
    def described(self, images: Tensor, prompts: list[str], metadata: list[Metadata] | None = None) -> Tensor:
        """Return ``parts`` of images [B, 3, H, W], float32 [B, len(part_names)]; NaN where a part is undefined.

        Raises:
            UserError: ``parts`` did not return a column of real numbers for each of ``part_names``.
            RewardError: ``parts`` raised an exception.
        """
        returned = self._call(self.parts, images, prompts, [{} for _ in prompts] if metadata is None else metadata)
        return numbers_of(self.name, "parts", returned, (len(images), len(self.part_names))).to(images.device)

    def _call(self, method: Callable[..., Any], images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Any:
        """Return what a method of the reward returns for images, prompts and metadata.

        It gets copies of images and prompts, and may change them. Exceptions name the reward, and a line of its code,
        without a context manager of contextlib: it would raise a StopIteration, by which Lightning's loops end, as it
        is.
        """
        try:
            return retry_with_empty_cache(
                lambda: call_with_metadata(method, images.clone(), list(prompts), metadata=metadata)
            )
        except torch.OutOfMemoryError as error:
            raise RewardOutOfMemory(
                f"the device has no memory left for the reward {self.name}: {sentence(error)}"
            ) from error
        except ServerError as error:
            if interrupts.ENDING.is_set():
                raise SIGTERMException from error
            raise
        except _NAMED:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            code = getattr(inspect.unwrap(type(self).score), "__code__", None)  # a decorated one may have none
            left = ([frame for frame in frames if code and frame.filename == code.co_filename] or frames)[-1]
            raise RewardError(
                f"the reward {self.name} raises {type(error).__name__} in {left.filename}, line {left.lineno}: "
                f"{sentence(error)}"
            ) from error

    def try_out(self, image: Tensor, prompt: str, metadata: Metadata) -> None:
        """Score a grey image [3, H, W] of the model's size twice in a batch, before the model is loaded.

        Raises:
            UserError: ``score`` or ``parts`` fails, or does not return a finite number, or the parts, for an image.
        """
        try:
            self(image.repeat(2, 1, 1, 1), [prompt] * 2, [metadata] * 2)
            self.described(image.repeat(2, 1, 1, 1), [prompt] * 2, [metadata] * 2)
        except (NonFiniteError, RewardError) as error:
            raise UserError(
                f"the reward {self.name} is invalid: it must score a grey image; {str(error).rstrip('.')}. Correct it."
            ) from error

    @abstractmethod
    def score(self, images: Tensor, prompts: list[str], *args: Any, **kwargs: Any) -> Tensor:
        """Return scores [B] of images [B, 3, H, W] in [0, 1], which are already validated.

        A third parameter ``metadata`` gets a list of B dicts, which are empty for prompts without metadata.
        """

    def parts(self, images: Tensor, prompts: list[str], *args: Any, **kwargs: Any) -> Tensor:
        """Return properties of images [B, 3, H, W] that explain their scores, float32 [B, len(part_names)].

        NaN where one is undefined, as of an object that is not found; its mean is then unknown. ``metadata`` as in
        ``score``.
        """
        return images.new_zeros(len(images), 0)

    def check_prompts(self, prompts: list[str], *args: Any, **kwargs: Any) -> None:  # noqa: B027  (most take any text)
        """Raise ``UserError`` for a prompt that the reward cannot score; ``metadata`` as in ``score``."""


def numbers_of(name: str, method: str, returned: Any, *shapes: tuple[int, ...]) -> Tensor:
    """Return what a reward's ``method`` returned, a tensor, an array or a list, as float32 of one of the ``shapes``.

    None in a list is a missing score, NaN, and so is what an array masks.

    Raises:
        UserError: it is something else, complex, or not stored as plain numbers.
    """
    numbers, actual = None, type(returned).__name__
    with suppress(TypeError, ValueError, RuntimeError):
        if isinstance(returned, list | tuple):
            returned = [math.nan if number is None else number for number in returned]
        elif isinstance(returned, np.ndarray) or hasattr(returned, "iloc"):  # a column of pandas
            array = np.ma.asanyarray(returned)  # of any strides and byte order, which torch does not take
            returned = array.astype(float).filled(math.nan) if array.dtype.kind in "fiub" else array
        numbers = torch.as_tensor(returned)
    if numbers is not None:
        is_plain = numbers.layout == torch.strided and not numbers.is_meta
        if is_plain and tuple(numbers.shape) in shapes and not numbers.is_complex():
            return numbers.float()
        actual = f"{numbers.dtype} {list(numbers.shape)}" + f" of {numbers.layout} on {numbers.device}" * (not is_plain)
    raise UserError(
        f"the reward {name} is invalid: its {method}() must return real numbers, a tensor {list(shapes[0])}; it "
        f"returned {actual}. Correct {method}()."
    )


def call_with_metadata(method: Callable[..., T], *args: Any, metadata: list[Metadata]) -> T:
    """Call ``method(*args)``, or ``method(*args, copies of metadata)`` if it has a parameter of that name."""
    reads = "metadata" in inspect.signature(method).parameters
    return method(*args, copy.deepcopy(metadata)) if reads else method(*args)


def check_images(name: str, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> None:
    """Raise ``ValueError`` unless images are floats [B, 3, H, W] in [0, 1] and there are B prompts, with metadata.

    An image with NaN raises ``NonFiniteError`` instead: the model's numbers are at fault, not the caller.
    """
    are_images = images.is_floating_point() and images.ndim == 4 and images.shape[1] == 3
    if not are_images or not len(images) == len(prompts) == len(metadata):
        raise ValueError(
            f"the reward {name} must be called with B images, floats [B, 3, H, W], B prompts and their B metadata; got "
            f"{images.dtype} {list(images.shape)}, {len(prompts)} prompts and {len(metadata)} metadata. Divide uint8 "
            "images by 255, stack them with the channels first, and give {} for no metadata."
        )
    lowest, highest = images.amin((1, 2, 3)), images.amax((1, 2, 3))  # torch returns NaN if an image has one
    inside = (lowest >= 0) & (highest <= 1)
    if not inside.all():
        row = int((~inside).nonzero()[0])
        low, high = float(lowest[row]), float(highest[row])
        if math.isnan(low):
            raise NonFiniteError(f"the image given to the reward {name} has NaN for the prompt {prompts[row]!r}", row)
        raise ValueError(
            f"the images of the reward {name} are invalid: values must be in [0, 1]; image {row} of {len(images)} "
            f"(prompt {prompts[row]!r}) spans {low:.3g} to {high:.3g}. Clamp or rescale the decoder's output."
        )


def check_scores(name: str, scores: Tensor, prompts: list[str]) -> None:
    """Raise ``NonFiniteError`` for the first of scores [B] that is NaN or infinite."""
    finite = scores.isfinite()
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise NonFiniteError(f"the reward {name} is {float(scores[row])} for the prompt {prompts[row]!r}", row)


def unique_prompts(prompts: list[str]) -> tuple[list[str], Tensor]:
    """Return the U unique prompts, and the index int64 [B] of each prompt in them, to encode equal prompts once."""
    place: dict[str, int] = {}
    index = [place.setdefault(prompt, len(place)) for prompt in prompts]
    return list(place), torch.tensor(index)
