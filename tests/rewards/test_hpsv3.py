"""HPSv3 against a computation of its own: patches by numpy, chats by hand, one image at a time, a head of matrices."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration

from solrl_lightning.rewards.hpsv3 import TOKEN, WEIGHTS, HPSv3

PROMPTS = ["a red circle above a blue square", "a circle", f"a {TOKEN} square"]
IMAGES = torch.rand(3, 3, 40, 40, generator=torch.Generator().manual_seed(0))


def before(prompt: str, tokens: int) -> str:
    """The chat up to the reward's token."""
    image = f"<|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>"
    return f"<|im_start|>user\n{image}\nDescribe the image. Textual prompt - {prompt}\n\n\nRate it: {TOKEN}"


@pytest.fixture
def reward(hpsv3: tuple[Path, Qwen2VLForConditionalGeneration], monkeypatch: pytest.MonkeyPatch) -> HPSv3:
    monkeypatch.chdir(hpsv3[0])
    return HPSv3("./model", "./qwen", dtype="float32", batch=2)


def patches(image: Tensor, side: int = 448) -> tuple[Tensor, Tensor]:
    """[n, 1176]: squares of 14 pixels in groups of 2 x 2, each for two frames, channels first; and the grid."""
    levels, n = (image * 255).round().byte().permute(1, 2, 0).numpy(), side // 28
    pixels = np.asarray(Image.fromarray(levels).resize((side, side), Image.Resampling.BICUBIC), np.float64) / 255
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    pixels = ((pixels - mean) / std).reshape(n, 2, 14, n, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    rows = np.repeat(pixels.reshape(4 * n * n, 3, 1, 14 * 14), 2, axis=2).reshape(4 * n * n, -1)
    return torch.tensor(rows, dtype=torch.float32), torch.tensor([[1, 2 * n, 2 * n]])


def reference(hpsv3: tuple[Path, Qwen2VLForConditionalGeneration], image: Tensor, prompt: str) -> float:
    folder, model = hpsv3
    tokenizer = AutoTokenizer.from_pretrained(folder / "qwen")
    tokenizer.add_special_tokens({"additional_special_tokens": [TOKEN]})
    tokens = torch.tensor([tokenizer(before(prompt, 256)).input_ids])
    pixels, grid = patches(image)
    kinds = (tokens == model.config.image_token_id).int()
    options = dict(pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kinds, output_hidden_states=True)
    with torch.no_grad():
        x = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options).hidden_states[-1][0, -1].double()
    with safe_open(folder / "model" / WEIGHTS, framework="pt") as file:
        for layer in (0, 3, 5):
            x = file.get_tensor(f"rm_head.{layer}.weight").double() @ x + file.get_tensor(f"rm_head.{layer}.bias")
            x = x.relu() if layer != 5 else x
    return float(x[0])


def test_scores_equal_the_reference(reward: HPSv3, hpsv3: tuple[Path, Qwen2VLForConditionalGeneration]) -> None:
    scores = reward(IMAGES, PROMPTS)
    expected = [
        reference(hpsv3, image, prompt.replace("<|", "< |")) for image, prompt in zip(IMAGES, PROMPTS, strict=True)
    ]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    swapped = reward(IMAGES[[1, 0, 2]], PROMPTS)
    assert ((swapped - scores)[:2].abs() > 1e-3).all()  # the image tells
    assert abs(float(reward(IMAGES[:1], PROMPTS[1:2]) - scores[0])) > 1e-3  # and the prompt


def test_dtype_and_batch_change_a_score_by_rounding(reward: HPSv3) -> None:
    scores = reward(IMAGES, PROMPTS)
    torch.testing.assert_close(HPSv3("./model", "./qwen", dtype="float32", batch=3)(IMAGES, PROMPTS), scores)
    rounded = HPSv3("./model", "./qwen")(IMAGES, PROMPTS)
    assert rounded.dtype == torch.float32 and 0 < (rounded - scores).abs().max() < 0.3
