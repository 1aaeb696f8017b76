"""OCR: whether the image shows the text that the prompt has in quotes.

    reward = max(0, 1 - d / n)        in [0, 1]

n is the length of the quoted text and d its Levenshtein distance from the text that RapidOCR reads in the image, 0 if
that contains it: Flow-GRPO's formula (Liu et al. 2025, arXiv 2505.05470; flow_grpo/ocr.py) with PaddleOCR's models.
"""

import re
import unicodedata
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.text import edit_distance

from solrl_lightning.errors import UserError
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rewards.preprocessing import eight_bits

_OPTIONS = {
    # As PaddleOCR 2, which Flow-GRPO uses: larger images are scaled down to 960 pixels, smaller ones are not scaled up,
    # and no model looks for upside-down lines.
    "Det.limit_type": "max",
    "Det.limit_side_len": 960,
    "Global.use_cls": False,
    "Global.log_level": "error",  # it warns for every image without text
}

_QUOTES = str.maketrans("‘’“”", "''\"\"")


class OCR(Reward):
    """Reads images one by one on the CPU; scores are returned on ``device``."""

    name = "ocr"
    example = ('a sign that says "open"', {})

    def __init__(self, device: str | torch.device = "cpu") -> None:
        # RapidOCR imports onnxruntime at the first image.
        rapidocr: Any = import_module("rapidocr")
        self.device = torch.device(device)
        self._read = rapidocr.RapidOCR(params=_OPTIONS)

    def check_prompts(self, prompts: list[str]) -> None:
        """Raise ``UserError`` for a prompt without text in double quotes, or with letters there that no model reads."""
        for prompt in prompts:
            if unknown := unreadable(text_in_quotes(prompt)):
                raise UserError(
                    f"the prompt {prompt!r} is invalid: reward=ocr cannot read {' '.join(unknown)}. "
                    "Quote text in Latin letters of Europe, or in usual Chinese or Japanese ones."
                )

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        pictures = (eight_bits(images) * 255).byte().permute(0, 2, 3, 1).cpu().numpy()[..., ::-1]  # blue, green, red
        read = ["".join(self._read(picture).txts or ()) for picture in pictures]
        scores = [similarity(text, text_in_quotes(prompt)) for text, prompt in zip(read, prompts, strict=True)]
        return torch.tensor(scores, device=self.device)


def text_in_quotes(prompt: str) -> str:
    """Return the first text in straight double quotes, or else in typographic ones. Raises ``UserError``."""
    match = re.search('"([^"]*)"', prompt) or re.search("[“”„]([^“”]*)[“”]", prompt)
    if match is None or not match[1].strip():
        raise UserError(
            f"the prompt {prompt!r} is invalid: reward=ocr reads in the image what is in double quotes in the prompt, "
            'and here that is nothing. Write it as in: a sign that says "open". Or set data=ocr.'
        )
    return match[1]


def similarity(read: str, target: str) -> float:
    """Return max(0, 1 - distance / length of the target), 1 if ``read`` contains it; both ``plain``."""
    read, target = plain(read), plain(target)
    return 1.0 if target in read else max(0.0, 1 - float(edit_distance(read, target)) / len(target))


def plain(text: str) -> str:
    """Return a text without spaces and case, in the normal form NFKC and with straight quotes."""
    return "".join(unicodedata.normalize("NFKC", text).translate(_QUOTES).casefold().split())


def unreadable(text: str) -> list[str]:
    """Return the letters and digits of a text, as ``plain`` writes them, that are not in the recogniser's dictionary.

    PP-OCRv6 (small) has Latin letters of Europe, three quarters of the ideographs, kana, and the Greek letters of
    formulas, without accents; of Vietnamese it has a few.
    """
    letters = sorted({character for character in plain(text) if character.isalnum()})
    return [letter for letter in letters if letter not in _dictionary()]


@cache
def _dictionary() -> frozenset[str]:
    reader = import_module("rapidocr").RapidOCR(params=_OPTIONS | {"Global.use_det": False})
    reader(np.zeros((48, 320, 3), np.uint8))  # it loads the recogniser for the first picture
    return frozenset(reader.text_rec.postprocess_op.character)
