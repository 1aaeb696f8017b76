"""Input images of prompts, for the models that edit one. Imports no torch.

One instruction for two images is two prompts: `Prompt.identity` has the name of the image.
"""

import os
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from solrl_lightning.artifacts.complete import reading
from solrl_lightning.data.prompt import INPUT_IMAGE, Prompt
from solrl_lightning.errors import UserError

_END_OF_JPEG, _TAIL = b"\xff\xd9", 1024  # bytes
_PATH_MAX = 4096  # bytes, of Linux
_OF_DIFFSYNTH = "edit_image"
_BITS_OF_TIFF, _LEVELS_16 = 258, 65535  # a tag
_READABLE = "its picture must be whole, and of a format and a size that Pillow reads"
_SAVE = "Save it again, whole, as a PNG or JPEG file."


def with_image(prompt: Prompt, source: str) -> Prompt:
    """Return a row of ``source`` with the input image that it names.

    The image is relative to the folder of the source, or to ``images/`` in it, as Flow-Factory's data sets have it.

    Raises:
        UserError: the row names no image, or there is no such image, or it cannot be read.
    """
    name, folder = prompt.metadata.get("image"), Path(source).parent
    row = f"the prompt {prompt.text.strip()[:60]!r} of {source} is invalid"
    if _OF_DIFFSYNTH in prompt.metadata:
        raise UserError(
            f"{row}: image must be the image to edit, and beside {_OF_DIFFSYNTH} it is the result, as DiffSynth-Studio "
            f"writes it. Rename image to result, and {_OF_DIFFSYNTH} to image."
        )
    with reading(row):
        places = (folder, folder / "images") if len(str(name)) < _PATH_MAX else ()  # else a picture in base64
        files = (place / str(name) for place in places)
        file = next((file for file in files if file.is_file()), None)
    if file is None:
        what = f"the image of this one is {repr(name)[:60]}, and {folder} has no such file, nor has images/ in it"
        raise UserError(
            f'{row}: this model edits an image, so a prompt is a row {{"prompt": ..., "image": <file>}} of a .jsonl '
            f"file (data.train, data.eval, task.prompt_file); {'this one has no image' if name is None else what}. "
            "Correct the row, or put the file there; write pictures that a table holds as files "
            "(docs/models/qwen_image_edit.md), or choose a model without input."
        )
    with reading(f"{row}: {_READABLE}", fix=_SAVE):
        _check(file)
    return Prompt(prompt.text.strip(), {**prompt.metadata, INPUT_IMAGE: str(file.resolve())}, str(name))


def _check(file: Path) -> None:
    """Raise an error of Pillow, or ValueError, for an image that cannot be decoded, without decoding most of them.

    Decoding a large set takes minutes. A PNG file has check sums, Pillow opens no WebP file that is cut, and a whole
    JPEG file ends with its end marker, or with data of a camera behind it.
    """
    with Image.open(file) as image:
        highest_level(image)
        image.verify()
    with open(file, "rb") as content:
        content.seek(-min(_TAIL, file.stat().st_size), os.SEEK_END)
        is_whole = image.format in ("PNG", "WEBP") or (image.format == "JPEG" and _END_OF_JPEG in content.read())
    if not is_whole:
        with Image.open(file) as image:
            image.load()


def highest_level(image: Image.Image) -> int:
    """Return the level of white in a file as Pillow reads it. Raises UserError for 32 bits, which have none."""
    if image.mode.startswith("I;16"):
        return 2 ** getattr(image, "tag_v2", {}).get(_BITS_OF_TIFF, (16,))[0] - 1
    if image.mode == "I" and image.format == "PPM":  # whose levels Pillow scales to 16 bits
        return _LEVELS_16
    if image.mode in ("I", "F"):
        raise UserError(
            f"the picture {getattr(image, 'filename', '')} is invalid: a pixel must have at most 16 bits, and these "
            f"have 32 (mode {image.mode} of Pillow). Save it with 8, as a PNG file."
        )
    return 255


def as_rgb(image: Image.Image, highest: int) -> Image.Image:
    """Convert an image with this `highest_level` to 8 bits a channel in RGB."""
    if highest > 255 or image.mode.startswith("I"):  # `convert` would clip
        levels = np.asarray(image, np.float64) * (255 / highest)
        image = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


@lru_cache(maxsize=32)
def load_square(file: str, side: int) -> Image.Image:
    """Crop the square in the middle of an image, upright, in RGB, with ``side`` pixels a side."""
    rule = f"the input image {file} is invalid: {_READABLE}"
    with reading(rule, fix=_SAVE), Image.open(file) as opened:
        image = as_rgb(ImageOps.exif_transpose(opened), highest_level(opened))
    width, height = image.size
    square = min(width, height)
    left, top = (width - square) // 2, (height - square) // 2
    image = image.crop((left, top, left + square, top + square))
    return image.resize((side, side), Image.Resampling.LANCZOS)  # as the pipelines of diffusers
