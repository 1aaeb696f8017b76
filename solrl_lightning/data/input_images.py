"""Input images of prompts, for the models that edit one. Imports no torch.

One instruction for two images is two prompts: `Prompt.identity` has the name of the image.
"""

import os
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from solrl_lightning.data.prompt import INPUT_IMAGE, Prompt
from solrl_lightning.errors import UserError, sentence

_END_OF_JPEG, _TAIL = b"\xff\xd9", 1024  # bytes


def with_image(prompt: Prompt, source: str) -> Prompt:
    """Return a row of ``source`` with the input image that it names.

    The image is relative to the folder of the source, or to ``images/`` in it, as Flow-Factory's data sets have it.

    Raises:
        UserError: the row names no image, or there is no such image, or it cannot be read.
    """
    name, row = prompt.metadata.get("image"), f"the prompt {prompt.text.strip()[:60]!r} of {source} is invalid"
    if not isinstance(name, str) or not name:
        raise UserError(
            f'{row}: this model edits an image, so a prompt is a row {{"prompt": ..., "image": <file>}} of a .jsonl '
            f"file; this one has {'no name of a file' if name is None else repr(name)}. Add it, and write pictures "
            "that a table holds as files (docs/models/qwen_image_edit.md), or choose a model without input."
        )
    folder = Path(source).parent
    files = [folder / name, folder / "images" / name]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise UserError(
            f"{row}: its image must be a file; there is neither {files[0]} nor {files[1]}. Correct the row, or put the "
            "file there."
        )
    try:
        _check(file)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{row}: its image cannot be read: {sentence(error)} Write the file again.") from error
    return Prompt(prompt.text.strip(), {**prompt.metadata, INPUT_IMAGE: str(file.resolve())}, name)


def _check(file: Path) -> None:
    """Raise an error of Pillow, or ValueError, for an image that cannot be decoded, without decoding most of them.

    Decoding a large set takes minutes. A PNG file has check sums, and a whole JPEG file ends with its end marker, or
    with data of a camera behind it.
    """
    with Image.open(file) as image:
        _check_depth(image)
        image.verify()
    with open(file, "rb") as content:
        content.seek(-min(_TAIL, file.stat().st_size), os.SEEK_END)
        is_whole = image.format != "JPEG" or _END_OF_JPEG in content.read()
    if not is_whole:
        with Image.open(file) as image:
            image.load()


def _check_depth(image: Image.Image) -> None:
    if image.mode in ("I", "F"):  # of 32 bits, which `convert` would clip at 255
        raise ValueError(f"its pixels have 32 bits (mode {image.mode}), and must have 8 or 16")


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to 8 bits a channel in RGB. Raises ValueError for other depths than 8 and 16 bits."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image, np.float64) / 257).round().astype(np.uint8)).convert("RGB")
    _check_depth(image)
    return image.convert("RGB")


@lru_cache(maxsize=32)
def load_square(file: str, side: int) -> Image.Image:
    """Crop the square in the middle of an image, upright, in RGB, with ``side`` pixels a side."""
    try:
        with Image.open(file) as opened:
            image = as_rgb(ImageOps.exif_transpose(opened))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"the input image {file} cannot be read: {sentence(error)} Write the file again.") from error
    width, height = image.size
    square = min(width, height)
    left, top = (width - square) // 2, (height - square) // 2
    image = image.crop((left, top, left + square, top + square))
    return image.resize((side, side), Image.Resampling.LANCZOS)  # as the pipelines of diffusers
