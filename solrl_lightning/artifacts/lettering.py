"""Text in pictures: each character in a font that has it, DejaVu Sans of matplotlib or one of the system."""

import logging
import textwrap
import unicodedata
from functools import cache
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.font_manager import findSystemFonts
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

log = logging.getLogger(__name__)

_FONT = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf"  # Pillow's default font lacks é
_STYLES = ("bold", "italic", "oblique", "light", "thin", "black", "serif", "mono")  # in names of files, used last
_BITMAPS = (109, 160)  # pixels of the emoji of Noto and of Apple, which have no other size
_NOT_DRAWN = ("Cc", "Cf", "Mn")  # categories of Unicode: such as a joiner of two emoji, where no font has it


def write(canvas: Image.Image, place: tuple[int, int], text: str, size: int, colour: str) -> None:
    """Write a line of text into an RGB image, from its upper left corner on."""
    x, top = place
    baseline = top + ImageFont.truetype(_FONT, size).getmetrics()[0]
    drawn = (each for each in text if unicodedata.category(each) not in _NOT_DRAWN or _font_with(each) is not None)
    for file, characters in groupby(drawn, key=lambda character: _font_with(character) or _box()):
        run, font = "".join(characters), _opened(file, size)
        if font.size == size:
            ImageDraw.Draw(canvas).text((x, baseline), run, colour, font, "ls", embedded_color=True)
        else:
            left, above, right, below = map(round, font.getbbox(run, anchor="ls"))
            tile = Image.new("RGBA", (right - left, below - above))
            ImageDraw.Draw(tile).text((-left, -above), run, colour, font, "ls", embedded_color=True)
            tile = tile.resize((round(tile.width * size / font.size), round(tile.height * size / font.size)))
            canvas.paste(tile, (x, baseline + round(above * size / font.size)), tile)
        x += round(font.getlength(run) * size / font.size)


def wrap(text: str, width: int, size: int, lines: int = 1) -> list[str]:
    """Return ``text`` in at most ``lines`` lines of ``width`` pixels, estimated by the mean width of a letter."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text) / max(len(text), 1)
    letter = size * (0.62 * (1 - wide) + wide)
    return textwrap.wrap(text, max(int(width / letter), 2), max_lines=lines, placeholder="…")


@cache
def _font_with(character: str) -> str | None:
    """Return the file of the first font that has the character."""
    return next((file for file in _files() if ord(character) in _characters(file)), None)


@cache
def _files() -> list[str]:
    def order(file: str) -> tuple[bool, str]:
        return any(style in Path(file).stem.lower() for style in _STYLES), file

    return [_FONT, *sorted(map(str, findSystemFonts()), key=order)]


@cache
def _characters(file: str) -> frozenset[int]:
    """Return the characters of a font; none of one that cannot be drawn."""
    try:
        _opened(file, 16)
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()


@cache
def _opened(file: str, size: int) -> ImageFont.FreeTypeFont:
    for each in (size, *_BITMAPS):
        try:
            return ImageFont.truetype(file, each)
        except OSError as error:
            reason = error
    raise reason


@cache
def _box() -> str:
    log.warning(
        "no font of this machine has some characters of the prompts, which are boxes in pictures; fonts-noto-core, "
        "fonts-noto-cjk and fonts-noto-color-emoji are packages of Debian and Ubuntu"
    )
    return _FONT
