"""HPSv3 against a computation of its own: patches by numpy, chats by hand, one image at a time, a head of matrices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nano import _qwen_tokenizer
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from take_away import take_each_file_away
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

from solrl_lightning.errors import UserError
from solrl_lightning.rewards.hpsv3 import REPOSITORY, SOURCE, TOKEN, WEIGHTS, HPSv3, read_instruction

WIDTH = 32
PROMPTS = ["a red circle above a blue square", "a circle", f"a {TOKEN} square"]
IMAGES = torch.rand(3, 3, 40, 40, generator=torch.Generator().manual_seed(0))
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CODE = '''import torch
INSTRUCTION = """
Describe the image. Textual prompt - {text_prompt}

"""
prompt_with_special_token = """
Rate it: <|Reward|>
"""
'''


def before(prompt: str, tokens: int) -> str:
    """The chat up to the reward's token."""
    image = f"<|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>"
    return f"<|im_start|>user\n{image}\nDescribe the image. Textual prompt - {prompt}\n\n\nRate it: {TOKEN}"


def qwen_config(tokenizer: Any, more: int = 0) -> dict[str, Any]:
    """Arguments of a small Qwen2-VL for the tokens of ``tokenizer`` and some ``more``."""
    numbers = tokenizer.convert_tokens_to_ids(VISION)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    sizes = dict(hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    rope = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=10000.0)
    text = sizes | dict(num_key_value_heads=2, vocab_size=len(tokenizer) + more, rope_parameters=rope)
    vision = dict(depth=2, embed_dim=32, num_heads=2, hidden_size=WIDTH, mlp_ratio=2)
    return dict(text_config=text, vision_config=vision, **dict(zip(names, numbers, strict=True)))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2VLForConditionalGeneration]:
    """Files of Qwen2-VL and of HPSv3 in the published layout, with small random weights, and their model."""
    root = tmp_path_factory.mktemp("hpsv3")
    (root / REPOSITORY / SOURCE).parent.mkdir(parents=True)
    (root / REPOSITORY / SOURCE).write_text(CODE)
    tokenizer = _qwen_tokenizer()
    tokenizer.add_tokens(VISION, special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "qwen")
    config = Qwen2VLConfig(**qwen_config(tokenizer, more=1))
    config.save_pretrained(root / "qwen")
    Qwen2VLImageProcessor().save_pretrained(root / "qwen")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2VLForConditionalGeneration(config)
        for parameter in model.parameters():
            parameter.data.mul_(3)  # so that images and prompts tell
        shapes = {"0": (1024, WIDTH), "3": (16, 1024), "5": (2, 16)}
        head = {f"rm_head.{layer}.weight": torch.randn(shape) / shape[1] ** 0.5 for layer, shape in shapes.items()}
        head |= {f"rm_head.{layer}.bias": torch.randn(shape[0]) for layer, shape in shapes.items()}
    (root / "model").mkdir()
    # As older versions of transformers, by which it was saved, name its parts.
    state = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): value.clone()
        for name, value in model.state_dict().items()
    }
    save_file(state | head, root / "model" / WEIGHTS)
    return root, model.eval()


@pytest.fixture
def folder(published: tuple[Path, Qwen2VLForConditionalGeneration]) -> Path:
    return published[0]


@pytest.fixture
def reward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> HPSv3:
    monkeypatch.chdir(folder)
    return HPSv3("./model", "./qwen", dtype="float32", batch=2)


def patches(image: Tensor, side: int = 448) -> tuple[Tensor, Tensor]:
    """[n, 1176]: squares of 14 pixels in groups of 2 x 2, each for two frames, channels first; and the grid."""
    levels, n = (image * 255).round().byte().permute(1, 2, 0).numpy(), side // 28
    pixels = np.asarray(Image.fromarray(levels).resize((side, side), Image.Resampling.BICUBIC), np.float64) / 255
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    pixels = ((pixels - mean) / std).reshape(n, 2, 14, n, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    rows = np.repeat(pixels.reshape(4 * n * n, 3, 1, 14 * 14), 2, axis=2).reshape(4 * n * n, -1)
    return torch.tensor(rows, dtype=torch.float32), torch.tensor([[1, 2 * n, 2 * n]])


def reference(published: tuple[Path, Qwen2VLForConditionalGeneration], image: Tensor, prompt: str) -> float:
    folder, model = published
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


def test_scores_equal_the_reference(reward: HPSv3, published: tuple[Path, Qwen2VLForConditionalGeneration]) -> None:
    scores = reward(IMAGES, PROMPTS)
    expected = [
        reference(published, image, prompt.replace("<|", "< |")) for image, prompt in zip(IMAGES, PROMPTS, strict=True)
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


@pytest.mark.parametrize(
    ("code", "error"), [("INSTRUCTION = 'x'", True), (CODE, False), (CODE.replace("{text_prompt}", "it"), True)]
)
def test_source_without_the_instruction_raises(tmp_path: Path, code: str, error: bool) -> None:
    (tmp_path / "source.py").write_text(code)
    if not error:
        assert read_instruction(tmp_path / "source.py").endswith("\n\n\nRate it: <|Reward|>\n")
        return
    with pytest.raises(UserError, match="source.py is invalid: it must assign INSTRUCTION"):
        read_instruction(tmp_path / "source.py")


def test_other_weights_raise(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    save_file({"weight": torch.zeros(3)}, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match="is not HPSv3's. Give MizzenAI/HPSv3"):
        HPSv3(str(tmp_path), "./qwen")


def test_a_file_that_is_missing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    image = IMAGES[:1, :, :28, :28]
    needed = take_each_file_away(folder, lambda: [HPSv3("./model", "./qwen", dtype="float32")(image, PROMPTS[:1])])
    assert all(needed.values())
