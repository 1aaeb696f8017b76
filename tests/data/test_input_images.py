"""Prompts with input images: what their rows name, and errors of one line."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from solrl_lightning.data.input_images import load_square
from solrl_lightning.data.prompt import Prompt, identities
from solrl_lightning.data.prompts import read_prompt_sets, read_prompts
from solrl_lightning.errors import UserError


def write(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (6, 4), "red").save(tmp_path / "red.png")
    Image.new("RGB", (4, 6), "blue").save(tmp_path / "images" / "blue.png")
    return tmp_path


def test_instruction_for_two_images_is_two_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    red, blue = ({"prompt": " make it green ", "image": name, "tag": name[:-4]} for name in ("red.png", "blue.png"))
    train = write(folder / "train.jsonl", red, blue, red)
    prompts = read_prompts(train, with_images=True)
    file = str(folder / "images" / "blue.png")
    assert prompts[1] == Prompt(
        "make it green", {"image": "blue.png", "tag": "blue", "input_image": file}, image="blue.png"
    )
    assert identities(prompts) == ["make it green [image: red.png]", "make it green [image: blue.png]"]
    assert prompts[1].input_image == file
    assert identities(read_prompts(train)) == ["make it green"]  # of a model that takes no image
    sets = read_prompt_sets(train, write(folder / "test.jsonl", red), with_images=True)
    assert (sets.train, sets.eval) == (prompts[1:], prompts[:1])  # the same text with another image is not held out
    monkeypatch.chdir(folder)
    assert read_prompt_sets("train.jsonl", None, with_images=True).train[1].input_image == file


def test_held_out_prompt_has_the_same_picture_whatever_its_name(tmp_path: Path) -> None:
    for name, colour in (
        ("train/0.png", "red"),
        ("train/1.png", "blue"),
        ("train/A.png", "lime"),
        ("train/a.png", "tan"),
    ):
        (tmp_path / "train").mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), colour).save(tmp_path / name)
    (tmp_path / "test").mkdir()
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "test" / "0.png")
    rows = [{"prompt": "make it green", "image": name} for name in ("0.png", "1.png", "A.png", "a.png")]
    train, test = write(tmp_path / "train" / "a.jsonl", *rows), write(tmp_path / "test" / "a.jsonl", rows[0])
    sets = read_prompt_sets(train, test, with_images=True)
    assert [prompt.image for prompt in sets.train] == ["0.png", "A.png", "a.png"]
    assert sets.notes == [f"{train}: dropped 1 of 4 prompts that are held out in {test}"]


def test_input_image_of_a_row_is_left_out_where_the_model_edits_none(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "a cat", "input_image": "/nowhere.png", "tag": "pet"})
    sets = read_prompt_sets(file, None)
    assert sets.train == [Prompt("a cat", {"tag": "pet"})]
    assert sets.notes == [f"{file}: left out input_image, as the model edits no image"]


def test_the_content_of_a_prompt_is_that_of_its_picture_and_its_metadata(folder: Path) -> None:
    def content(copy: str, colour: str, **more: Any) -> str:
        shutil.copytree(folder, folder / copy, ignore=shutil.ignore_patterns("?"))
        Image.new("RGB", (6, 4), colour).save(folder / copy / "red.png")
        row = {"prompt": "make it green", "image": "red.png", **more}
        (prompt,) = read_prompts(write(folder / copy / "train.jsonl", row), with_images=True)
        return prompt.content

    same = content("a", "red")
    assert content("b", "red") == same != content("c", "lime")
    assert content("d", "red", tag="edit") != same
    assert Prompt("make it green").content == "make it green"


KINDS = ("jpg", "png", "webp", "bmp", "gif", "tiff")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"row \{\"prompt\": ..., \"image\": <file>\} of a .jsonl file .*; this one has no image. Correct"),
        (
            {"image": "a.jpg", "edit_image": "a.jpg"},
            "beside edit_image it is the result, .* Rename image to result, and",
        ),
        ({"image": 7}, "the image of this one is 7, and"),
        (
            {"image": "other.png"},
            "is 'other.png', and .* has no such file, nor has images/ in it. Correct the row, or put the file",
        ),
        (
            {"image": f"data:image/png;base64,{'A' * 5000}"},
            "the image of this one is 'data:image/png;base64,A{37}, and",
        ),
        ({"image": "images"}, "the image of this one is 'images', and .* has no such file"),
        ({"image": "phone.heic"}, "of a format and a size that Pillow reads: .* as a PNG or JPEG file"),
        *(({"image": f"cut.{kind}"}, "must be whole, .* Save it again, whole") for kind in KINDS),
    ],
)
def test_row_without_a_readable_image_is_an_error(folder: Path, row: dict[str, Any], message: str) -> None:
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    for kind in KINDS:
        Image.fromarray(noise).save(folder / f"a.{kind}")
        whole = (folder / f"a.{kind}").read_bytes()
        (folder / f"cut.{kind}").write_bytes(whole[: len(whole) // 2])
    with open(folder / "a.jpg", "ab") as file:
        file.write(b"video" * 1000)  # of a camera
    (folder / "phone.heic").write_bytes(b"\0\0\0\x24ftypheic")
    first = {"prompt": "a", "image": "a.jpg"}
    train = write(folder / "train.jsonl", first, {"prompt": "make it green"} | row)
    with pytest.raises(UserError, match=message) as error:
        read_prompt_sets(train, None, with_images=True)
    assert "the prompt 'make it green' of " in str(error.value) and "\n" not in str(error.value)
    assert len(read_prompts(train)) == 2


def test_square_is_the_middle_of_the_upright_image(tmp_path: Path) -> None:
    pixels = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "high.png")
    assert np.array_equal(load_square(str(tmp_path / "high.png"), 4), pixels[1:5])
    turned = Image.Exif()
    turned[0x0112] = 6  # as a camera stores a picture that it took on its side
    image.save(tmp_path / "turned.png", exif=turned)
    assert np.array_equal(load_square(str(tmp_path / "turned.png"), 4), np.rot90(pixels, -1)[:, 1:5])
    image.convert("RGBA").save(tmp_path / "alpha.png")
    small = load_square(str(tmp_path / "alpha.png"), 2)
    assert (small.mode, small.size) == ("RGB", (2, 2))


def test_pictures_of_16_bits_keep_their_levels_and_other_depths_are_errors(tmp_path: Path) -> None:
    levels = np.array([[0, 257 * 19], [257 * 128, 65535]], np.uint16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    assert np.asarray(load_square(str(tmp_path / "deep.png"), 2))[..., 0].tolist() == [[0, 19], [128, 255]]
    for dtype, mode in ((np.float32, "F"), (np.int32, "I")):
        Image.fromarray(levels.astype(dtype)).save(tmp_path / f"{mode}.tiff")
        with pytest.raises(UserError, match=rf"{mode}.tiff is invalid: .* at most 16 bits, .* 32 \(mode {mode} of"):
            load_square(str(tmp_path / f"{mode}.tiff"), 2)
    (tmp_path / "deep.pgm").write_bytes(b"P5 2 1 4095\n" + bytes([0x0F, 0xFF, 0x08, 0x00]))
    assert np.asarray(load_square(str(tmp_path / "deep.pgm"), 1)).max() in (128, 255)


def test_picture_of_12_bits_keeps_its_levels(tmp_path: Path) -> None:
    file = tmp_path / "a.tiff"
    entries = [(256, 2), (257, 2), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, 2), (279, 6)]
    levels = bytes([0xFF, 0xFF, 0xFF, 0x80, 0x08, 0x00])  # 4095 4095, 2048 2048
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    file.write_bytes(struct.pack("<2sHI", b"II", 42, 14) + levels + struct.pack("<H", 9) + fields + bytes(4))
    assert np.asarray(load_square(str(file), 2))[..., 0].tolist() == [[255, 255], [128, 128]]
