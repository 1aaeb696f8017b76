"""reward=vlm_local against transformers' model, one image at a time, with the chat and the patches made by hand."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_hpsv3 import patches
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration

from solrl_lightning.errors import NonFiniteError, UserError
from solrl_lightning.rewards.answers import normal, spellings
from solrl_lightning.rewards.base import Metadata
from solrl_lightning.rewards.vlm_local import LocalVLMReward

QUESTION = 'Does it show "{prompt}"?'
PROMPTS = ["a red circle above a blue square", "a circle", "a square"]
ANSWERS = {"yes": 1.0, "No": 0.0}
IMAGES = torch.rand(3, 3, 56, 56, generator=torch.Generator().manual_seed(0))


def reference(qwen2vl: str, image: Tensor, prompt: str, words: list[list[str]]) -> Tensor:
    """Probabilities [A] of the first token of each answer, among all that any answer has."""
    model, tokenizer = Qwen2VLForConditionalGeneration.from_pretrained(qwen2vl), AutoTokenizer.from_pretrained(qwen2vl)
    image_text = f"<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>"
    question = QUESTION.replace("{prompt}", prompt)
    text = f"<|im_start|>user\n{image_text}{question}<|im_end|>\n<|im_start|>assistant\n"
    tokens = torch.tensor([tokenizer(text).input_ids])
    pixels, grid = patches(image, 56)
    kinds = (tokens == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=tokens, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kinds).logits
    likelihoods = logits[0, -1].double().softmax(dim=-1)
    firsts = [{tokenizer(word).input_ids[0] for word in forms} for forms in words]
    shares = torch.stack([likelihoods[sorted(numbers)].sum() for numbers in firsts])
    return shares / shares.sum()


def test_score_is_the_expected_answer(qwen2vl: str) -> None:
    reward = LocalVLMReward(qwen2vl, QUESTION, {"yes": 1.0, "No": 0.0}, dtype="float32", batch=2)
    words = [["yes", "Yes", "YES", " yes"], ["no", "No", "NO"]]
    expected = [reference(qwen2vl, image, prompt, words)[0] for image, prompt in zip(IMAGES, PROMPTS, strict=True)]
    scores = reward(IMAGES, PROMPTS)
    torch.testing.assert_close(scores.double(), torch.stack(expected), rtol=1e-4, atol=1e-4)
    assert scores.std() > 1e-3
    marks = LocalVLMReward(qwen2vl, QUESTION, {"1": 0.0, "2": 0.5, "3": 1.0}, dtype="float32")
    shares = reference(qwen2vl, IMAGES[0], PROMPTS[0], ["1", "2", "3"])
    assert marks.tokens[0] != marks.tokens[1] and len(shares) == 3
    assert float(marks(IMAGES[:1], PROMPTS[:1])) == pytest.approx(float(shares @ torch.tensor([0, 0.5, 1.0]).double()))


def test_input_image_of_the_prompt_comes_before_the_image(qwen2vl: str, tmp_path: Path) -> None:
    levels = (IMAGES[:2] * 255).round().byte()
    to_pil_image(levels[0]).save(tmp_path / "in.png")
    reward = LocalVLMReward(qwen2vl, QUESTION, {"yes": 1.0, "No": 0.0}, dtype="float32")
    rows: list[Metadata] = [{}, {"image": "in.png", "input_image": str(tmp_path / "in.png")}]
    with_input, alone = reward(IMAGES[1:2].repeat(2, 1, 1, 1), PROMPTS[:1] * 2, rows[::-1])
    chat = [{"type": "image", "image": image} for image in levels]
    text = {"type": "text", "text": QUESTION.replace("{prompt}", PROMPTS[0])}
    options = dict(tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    inputs = reward.processor.apply_chat_template([[{"role": "user", "content": [*chat, text]}]], **options)
    with torch.no_grad():
        likelihoods = reward.model(**inputs).logits[0, -1].softmax(dim=-1)
    yes, no = (likelihoods[numbers].sum() for numbers in reward.tokens)
    torch.testing.assert_close(with_input, yes / (yes + no), rtol=1e-4, atol=1e-5)
    assert (with_input - alone).abs() > 1e-4


def test_chat_template_may_be_the_tokenizers_and_has_a_place_for_images(qwen2vl: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen2vl, tmp_path / "of_tokenizer"))
    template = folder / "chat_template.jinja"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template.read_text()}))
    template.unlink()
    scores = [LocalVLMReward(str(each), QUESTION, ANSWERS)(IMAGES, PROMPTS) for each in (folder, qwen2vl)]
    assert torch.equal(*scores)
    template.write_text("{% for message in messages %}{{ message.content[1].text }}{% endfor %}")
    reward = LocalVLMReward(str(folder), QUESTION, ANSWERS)
    rule = f"reward.vlm_local.pretrained={folder} is invalid: it cannot read a picture and a prompt: "
    with pytest.raises(UserError, match=f"^{rule}"):
        reward.try_out(IMAGES[0], PROMPTS[0], {})


def test_weights_that_the_configuration_has_no_layers_for_are_named(
    qwen2vl: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(qwen2vl, tmp_path / "few"))
    settings = json.loads((folder / "config.json").read_text())
    part = settings.get("text_config", settings)
    part["num_hidden_layers"] -= 1
    part.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(settings))
    LocalVLMReward(str(folder), QUESTION, ANSWERS)
    assert f"{folder} has weights that its config.json has no layers for" in caplog.text


def test_answers_with_the_same_first_token_raise(qwen2vl: str) -> None:
    with pytest.raises(UserError, match="'1' and '10' begin with the same token, '1'. Use answers that differ"):
        LocalVLMReward(qwen2vl, QUESTION, {1: 0.0, "10": 1.0})


def test_a_model_that_answers_otherwise_is_an_error_before_the_run(qwen2vl: str) -> None:
    reward = LocalVLMReward(qwen2vl, QUESTION, {"yes": 1.0, "No": 0.0}, dtype="float32")
    reward.try_out(IMAGES[0], PROMPTS[0], {})
    unlikely = torch.zeros(reward.model.lm_head.out_features)
    unlikely[[number for numbers in reward.tokens for number in numbers]] = -20.0
    reward.model.lm_head.bias = torch.nn.Parameter(unlikely)
    with pytest.raises(UserError, match=r"reward.vlm_local.answers is invalid: .* gives none of yes, No\. Set reward"):
        reward.try_out(IMAGES[0], PROMPTS[0], {})
    with pytest.raises(NonFiniteError):
        reward(IMAGES, PROMPTS)


@pytest.mark.parametrize("answer", ["yes", "No", "4", "straße", "ａ"])
def test_every_spelling_is_the_same_answer_to_both_judges(answer: str) -> None:
    assert {normal(form) for form in spellings(answer)} == {normal(answer)}


@pytest.mark.parametrize("file", ["config.json", "processor_config.json"])
def test_code_in_a_folder_is_not_run_and_waits_for_no_answer(
    qwen2vl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    folder = Path(shutil.copytree(qwen2vl, tmp_path / "with_code"))
    names = "AutoConfig AutoProcessor AutoModelForImageTextToText".split()
    settings = json.loads((folder / file).read_text())
    settings |= {"model_type": "other", "processor_class": "Other", "auto_map": dict.fromkeys(names, "own.Other")}
    (folder / file).write_text(json.dumps(settings))
    (folder / "own.py").write_text("raise SystemExit")
    with pytest.raises(UserError, match=f"reward.vlm_local.pretrained={folder} is invalid: "):
        LocalVLMReward(str(folder), QUESTION, ANSWERS)
