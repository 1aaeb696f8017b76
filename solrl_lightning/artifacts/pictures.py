"""Images from tensors, captioned grids of images, and PNG files."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from solrl_lightning.artifacts.lettering import wrap, write
from solrl_lightning.data.input_images import load_square

_MIN_CELL, _MAX_CELL = 128, 512  # pixels; smaller images are enlarged by an integer factor, larger ones shrunk
_GAP = 4  # between images
_WIDE_GAP = 20  # between column groups
_MARGIN = 10
_MIN_WIDTH = 420  # fits a title in two lines
_TITLE, _TEXT, _LINE = 16, 13, 18  # font sizes and line height


class Row(NamedTuple):
    """Row of a grid: caption above, groups of images [n, 3, H, W] in [0, 1], label under each image.

    ``input_image`` is the path of the image that a prompt edits.
    """

    caption: str
    groups: Sequence[Tensor]
    labels: Sequence[str] = ()
    input_image: str | None = None


def to_image(pixels: Tensor) -> Image.Image:
    """Return pixels [3, H, W] in [0, 1] as an 8-bit image."""
    levels = (pixels.detach().float().clamp(0, 1) * 255).round().byte()
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().cpu().numpy())


def to_png(image: Image.Image, facts: Mapping[str, Any] | None = None) -> bytes:
    """Return a PNG file with ``facts`` as UTF-8 text chunks."""
    text = PngInfo()
    for key, value in (facts or {}).items():
        text.add_itxt(key, str(value))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=text)
    return buffer.getvalue()


def to_animation(video: Tensor, rate: int = 16) -> bytes:
    """Return a WebP file of a video [F, 3, H, W] in [0, 1], with ``rate`` frames a second, 16 for Wan."""
    first, *others = map(to_image, video)
    buffer = io.BytesIO()
    first.save(buffer, format="WEBP", save_all=True, append_images=others, duration=round(1000 / rate), loop=0)
    return buffer.getvalue()


def to_cell(image: Tensor) -> Image.Image:
    """Return image [3, H, W] in [0, 1] with sides of at least 128 (by an integer factor) and at most 512 pixels."""
    picture = to_image(image)
    shorter, longer = min(picture.size), max(picture.size)
    if shorter < _MIN_CELL:
        return ImageOps.scale(picture, -(-_MIN_CELL // shorter), Image.Resampling.NEAREST)
    if longer > _MAX_CELL:
        return ImageOps.contain(picture, (_MAX_CELL, _MAX_CELL), Image.Resampling.LANCZOS)
    return picture


def draw_grid(title: str, headings: Sequence[str], rows: Sequence[Row]) -> Image.Image:
    """Return a captioned grid with a heading above each column group; long text ends in an ellipsis.

    If all rows have an input image, these are the first group.
    """
    if all(row.input_image is not None for row in rows):
        headings, rows = ["input", *headings], [_with_input(row) for row in rows]
    cells = [[[to_cell(image) for image in group] for group in row.groups] for row in rows]
    cell_width, cell_height = cells[0][0][0].size
    widths = [len(group) * (cell_width + _GAP) - _GAP for group in cells[0]]
    starts = [_MARGIN + sum(widths[:number]) + number * _WIDE_GAP for number in range(len(widths))]
    width = max(starts[-1] + widths[-1] + _MARGIN, _MIN_WIDTH)
    titles = wrap(title, width - 2 * _MARGIN, _TITLE, lines=2)
    captions = [wrap(row.caption, width - 2 * _MARGIN, _TEXT, lines=2) for row in rows]
    heights = [len(caption) * _LINE + cell_height + _LINE + 2 * _GAP for caption in captions]
    top = _MARGIN + (2 + len(titles)) * _LINE
    canvas = Image.new("RGB", (width, top + sum(heights)), "white")
    for number, line in enumerate(titles):
        write(canvas, (_MARGIN, _MARGIN + number * _LINE), line, _TITLE, "black")
    for start, heading, room in zip(starts, headings, widths, strict=True):
        room = room if len(starts) > 1 else width - 2 * _MARGIN
        write(canvas, (start, top - _LINE - _GAP), "".join(wrap(heading, room, _TEXT)), _TEXT, "dimgrey")
    for row, caption, groups, height in zip(rows, captions, cells, heights, strict=True):
        for number, line in enumerate(caption):
            write(canvas, (_MARGIN, top + number * _LINE), line, _TEXT, "black")
        images, labels = top + len(caption) * _LINE + _GAP, iter(row.labels)
        for start, group in zip(starts, groups, strict=True):
            for left, cell in zip(range(start, width, cell_width + _GAP), group, strict=False):
                canvas.paste(cell, (left, images))
                write(canvas, (left, images + cell_height), next(labels, ""), _TEXT, "black")
        top += height
    return canvas


def _with_input(row: Row) -> Row:
    assert row.input_image is not None
    image = pil_to_tensor(load_square(row.input_image, row.groups[0].shape[-1]))
    return Row(row.caption, [image[None] / 255, *row.groups], ["", *row.labels])
