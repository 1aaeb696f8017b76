"""OCR with RapidOCR's own models on drawn text; the distance against hand-made pairs."""

import socket
from typing import Any

import numpy as np
import pytest
import torch
from drawings import as_tensor, shipped
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from solrl_lightning.errors import UserError
from solrl_lightning.rewards.ocr import OCR, similarity, text_in_quotes


def sign(text: str) -> Tensor:
    """A picture [1, 3, 64, 192] of a text."""
    picture = Image.new("RGB", (192, 64), "white")
    ImageDraw.Draw(picture).text((12, 14), text, fill="black", font=ImageFont.load_default(30))
    return as_tensor(picture)[None]


@pytest.fixture(scope="module")
def reward() -> OCR:
    return shipped("ocr")


def test_models_are_in_the_wheel_and_read_what_is_drawn(reward: OCR, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    images = torch.cat([sign("Open Late")] * 3 + [sign("")])
    prompts = ['a sign "open late"', 'a sign "OPENLATE 24h"', 'a sign "closed" by a "road"', 'a sign "open late"']
    scores = reward(images, prompts)
    assert scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx([1, 8 / 11, similarity("Open Late", "closed"), 0])


def test_channels_are_in_the_order_of_opencv(reward: OCR, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: list[np.ndarray] = []
    read = reward._read
    monkeypatch.setattr(reward, "_read", lambda picture: inputs.append(picture) or read(picture))
    reward(torch.tensor([1.0, 0.5, 0.0])[None, :, None, None].expand(1, 3, 32, 32), ['"a"'])
    assert inputs[0][0, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize(
    ("read", "target", "score"),
    [
        ("NEW YORK", "New York", 1),
        ("welcometonewyorkcity", "New York", 1),  # contained, as in Flow-GRPO
        ("New Yrk", "New York", 6 / 7),
        ("", "New York", 0),
        ("entirely different words", "New York", 0),  # clipped
        ("kitten", "sitting", 4 / 7),
        ("ba", "ab", 0),
        ("CAFE\u0301", "café", 1),  # NFD and NFC
        ("OPEN 24", "Ｏｐｅｎ　２４", 1),
        ("DON'T", "don’t", 1),
        ("STRASSE", "Straße", 1),
    ],
)
def test_similarity_disregards_case_and_spaces_and_is_clipped(read: str, target: str, score: float) -> None:
    assert similarity(read, target) == pytest.approx(score)


@pytest.mark.parametrize("prompt", ["a sign", 'a 5" nail', 'a sign " "', "a sign 'open'", "a sign “”"])
def test_prompt_without_quoted_text_is_an_error(reward: OCR, prompt: str) -> None:
    with pytest.raises(UserError, match="is invalid: reward=ocr reads in the image what is in double quotes"):
        reward.check_prompts(['a sign "open"', prompt])


@pytest.mark.parametrize("text", ["Καλημέρα", "Привет", "مرحبا", "열림", "open Ж", "Việt", "ゑゐ", "龘"])
def test_text_in_letters_that_the_models_do_not_know_is_an_error(reward: OCR, text: str) -> None:
    known = ("Größe 24!", "Ｏｐｅｎ", "开店", "あかい", "2πr", "¡Sí…!", "Straße", "½ µm")
    reward.check_prompts([f'a sign "{text}"' for text in known])
    with pytest.raises(UserError, match="is invalid: reward=ocr cannot read .*Quote text in Latin"):
        reward.check_prompts(['a sign "open"', f'a sign "{text}"'])


@pytest.mark.parametrize("prompt", ['a "red" and a "blue" sign', "a “red” and a “blue” sign", "ein „red“ Schild"])
def test_first_quoted_text_is_the_target(prompt: str) -> None:
    assert text_in_quotes(prompt) == "red"
