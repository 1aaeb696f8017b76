"""Text in pictures, with fonts of the system that the test builds."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image, ImageFont

from solrl_lightning.artifacts import lettering
from solrl_lightning.artifacts.lettering import wrap, write


def build_font(file: Path, text: str) -> str:
    """Write a font whose letters, those of ``text``, are full squares of the height of the letters."""
    pen = TTGlyphPen(None)
    for step, corner in enumerate([(0, 0), (0, 1000), (1000, 1000), (1000, 0)]):
        (pen.lineTo if step else pen.moveTo)(corner)
    pen.closePath()
    font = FontBuilder(1000)
    font.setupGlyphOrder([".notdef", "square"])
    font.setupCharacterMap({ord(character): "square" for character in text})
    font.setupGlyf(dict.fromkeys((".notdef", "square"), pen.glyph()))
    font.setupHorizontalMetrics({name: (1000, 0) for name in (".notdef", "square")})
    font.setupHorizontalHeader(ascent=1000)
    font.setupNameTable({"familyName": file.stem, "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(file)
    return str(file)


def clear() -> None:
    for cached in (lettering._font_with, lettering._files, lettering._characters, lettering._opened, lettering._box):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def system_fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The list of the system's fonts, whose first one cannot be read."""
    (tmp_path / "a.ttf").write_bytes(b"no font")
    files = [str(tmp_path / "a.ttf")]
    monkeypatch.setattr(lettering, "findSystemFonts", lambda: files)
    clear()
    yield files
    clear()


def drawn(text: str) -> Image.Image:
    canvas = Image.new("RGB", (200, 40), "white")
    write(canvas, (10, 5), text, 20, "black")
    return canvas


def black(picture: Image.Image, left: int, right: int) -> int:
    return sum(pixel < 128 for pixel in picture.convert("L").crop((left, 0, right, 40)).tobytes())


def test_characters_are_written_by_the_first_plain_font_that_has_them(
    system_fonts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    system_fonts.append(build_font(tmp_path / "B-Bold.ttf", "赤い"))
    system_fonts.append(build_font(tmp_path / "C.ttf", "赤"))
    with caplog.at_level("WARNING"):
        picture = drawn("赤é\u200d\ufe0f赤")
    e_acute = round(ImageFont.truetype(lettering._FONT, 20).getlength("é"))
    assert black(picture, 10, 30) == black(picture, 30 + e_acute, 50 + e_acute) == 400  # squares of 20 pixels
    assert 0 < black(picture, 30, 30 + e_acute) < 200 and black(picture, 50 + e_acute, 200) == 0
    assert lettering._font_with("赤") == str(tmp_path / "C.ttf")
    assert lettering._font_with("い") == str(tmp_path / "B-Bold.ttf") and not caplog.messages
    assert drawn("é") == drawn("\u200dé")


def test_boxes_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        assert black(drawn("赤い"), 10, 60) > 0
        drawn("丸")
    (message,) = caplog.messages
    assert message.startswith("no font of this machine has some characters") and "fonts-noto-cjk" in message


def test_a_font_of_one_size_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn("Héllo")
    monkeypatch.setattr(lettering, "_opened", cache(lambda file, size: ImageFont.truetype(file, 109)))
    scaled = drawn("Héllo")
    boxes = (picture.convert("L").point(lambda level: 255 * (level < 128)).getbbox() for picture in (text, scaled))
    assert all(abs(a - b) <= 1 for a, b in zip(*boxes, strict=True))


@pytest.mark.parametrize(("text", "lines"), [("word " * 40, 2), ("赤" * 40, 2), ("赤" * 8, 1)], ids=range(3))
def test_lines_fit_the_width(text: str, lines: int, system_fonts: list[str], tmp_path: Path) -> None:
    system_fonts.append(build_font(tmp_path / "C.ttf", "赤"))
    wrapped = wrap(text, 180, 20, lines=2)
    assert len(wrapped) == lines
    for line in wrapped:
        assert black(drawn(line), 10, 190) > 0 and black(drawn(line), 191, 200) == 0
