"""HPSv3: human preference by Qwen2-VL 7B with a head of three layers (Ma et al. 2025, arXiv 2508.03789).

    reward = head(last hidden state at the token <|Reward|>)[0]

The head gives the mean and the spread of a preference; the reward is the mean, as in the authors' inference code. The
authors' instruction beside the image is part of the trained model and is read from their repository.

Shapes: B images, S tokens.
"""

import ast
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLImageProcessor, Qwen2VLModel
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from solrl_lightning.artifacts.complete import reading
from solrl_lightning.artifacts.files import check_state_dict_keys, load_tensors
from solrl_lightning.data.sources import github_file
from solrl_lightning.errors import UserError
from solrl_lightning.options.rules import Count
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rewards.loading import floating_dtype, read_parts

WEIGHTS, REPOSITORY, SOURCE = "HPSv3.safetensors", "MizzenAI/HPSv3", "hpsv3/dataset/data_collator_qwen.py"
TOKEN = "<|Reward|>"
_PIXELS = 256 * 28 * 28  # of every image, whose sides become multiples of 28
_HINT = f"`hf download {REPOSITORY} --local-dir <folder>` makes a folder with it."


class HPSv3(Reward):
    """HPSv3.

    Args:
        pretrained: hub id (16 GB) or folder with HPSv3.safetensors.
        processor: hub id or folder of Qwen2-VL 7B Instruct: configuration, tokenizer and image processor.
        device: where to score.
        dtype: of weights and activations; the head stays in float32.
        batch: images per forward pass.

    Raises:
        UserError: a file is missing, is damaged, is not HPSv3's, or does not fit the others.
    """

    name = "hpsv3"

    def __init__(
        self,
        pretrained: str,
        processor: str,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = torch.bfloat16,
        batch: Count = 4,
    ) -> None:
        super().__init__(device)
        self.dtype, self.batch = floating_dtype(self.name, dtype), batch
        self.instruction = read_instruction(github_file(REPOSITORY, SOURCE))
        parts = (Qwen2VLConfig, AutoTokenizer, Qwen2VLImageProcessor)
        key, file, kind = "reward.hpsv3.processor", "preprocessor_config.json", "Qwen2-VL model"
        config, self.tokenizer, self.images = read_parts(key, processor, file, kind, *parts, chats=True)
        self.tokenizer.add_special_tokens({"additional_special_tokens": [TOKEN]})
        self._token, self._image_token = self.tokenizer.convert_tokens_to_ids([TOKEN, "<|image_pad|>"])
        weights = _read_weights(pretrained)
        config.text_config.vocab_size = weights["language_model.embed_tokens.weight"].shape[0]
        if len(self.tokenizer) > config.text_config.vocab_size:
            raise UserError(
                f"{key}={processor} is invalid: its tokenizer has {len(self.tokenizer)} tokens with "
                f"{TOKEN}, and {pretrained} embeds {config.text_config.vocab_size}. Set it to the processor of the "
                "model's training."
            )
        head = {name.removeprefix("rm_head."): weights.pop(name) for name in sorted(weights) if "rm_head." in name}
        self.head = _head(head).to(self.device)
        with reading(f"{key}={processor} is invalid"):
            model, loading = Qwen2VLModel.from_pretrained(
                None, config=config, state_dict=weights, dtype=self.dtype, output_loading_info=True
            )
        key = "reward.hpsv3.pretrained"
        check_state_dict_keys(key, pretrained, loading["missing_keys"], loading["unexpected_keys"])
        self.model = model.eval().requires_grad_(False).to(self.device)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        levels = (images.float() * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        parts = range(0, len(prompts), self.batch)
        pictures = [Image.fromarray(image) for image in levels]
        return torch.cat([self._score(pictures[i : i + self.batch], prompts[i : i + self.batch]) for i in parts])

    def _score(self, pictures: list[Image.Image], prompts: list[str]) -> Tensor:
        height, width = smart_resize(pictures[0].height, pictures[0].width, min_pixels=_PIXELS, max_pixels=_PIXELS)
        resized = [picture.resize((width, height), Image.Resampling.BICUBIC) for picture in pictures]
        pixels = self.images(resized, do_resize=False, return_tensors="pt")
        grid = pixels["image_grid_thw"]
        counts = (grid.prod(dim=1) // self.images.merge_size**2).tolist()
        texts = [self._chat(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
        tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(self.device)
        states = self.model(
            **tokens,
            pixel_values=pixels["pixel_values"].to(self.device, self.dtype),
            image_grid_thw=grid.to(self.device),
            mm_token_type_ids=(tokens["input_ids"] == self._image_token).int(),
        ).last_hidden_state  # [B, S, width]
        rows, places = (tokens["input_ids"] == self._token).nonzero(as_tuple=True)
        assert rows.tolist() == list(range(len(prompts)))  # one in each text
        score: Tensor = self.head(states[rows, places].float())[:, 0]
        return score

    def _chat(self, prompt: str, count: int) -> str:
        """Return the chat of an image of ``count`` tokens with a prompt; special tokens in the prompt are split."""
        text = self.instruction.replace("{text_prompt}", prompt.replace("<|", "< |"))
        content = [{"type": "image"}, {"type": "text", "text": text}]
        chat = [{"role": "user", "content": content}]
        whole: str = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return whole.replace("<|image_pad|>", "<|image_pad|>" * count)


def read_instruction(file: Path) -> str:
    """Read the text beside the image, with ``{text_prompt}`` and ``TOKEN``, from the authors' data loader."""
    values: dict[str, Any] = {}
    try:
        nodes = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):  # such as a page about an error
        nodes = []
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value.value if isinstance(node.value, ast.Constant) else None
    text = f"{values.get('INSTRUCTION')}{values.get('prompt_with_special_token')}"
    if text.count("{text_prompt}") != 1 or text.count(TOKEN) != 1:
        raise UserError(
            f"{file} is invalid: it must assign INSTRUCTION and prompt_with_special_token, as {SOURCE} of "
            f"https://github.com/{REPOSITORY} does. Delete it, or clone that repository into {REPOSITORY}."
        )
    return text


def _read_weights(pretrained: str) -> dict[str, Tensor]:
    """Return tensors by their names in ``Qwen2VLModel``; names of the head begin with rm_head."""
    key = "reward.hpsv3.pretrained"
    tensors = load_tensors(key, pretrained, WEIGHTS, kind="HPSv3 model", hint=_HINT)
    renamed = {}
    for name, value in tensors.items():
        if not name.startswith("lm_head."):  # of generation
            inner = name.removeprefix("model.")
            text = name.startswith("model.") and not inner.startswith(("language_model.", "visual."))
            renamed[f"language_model.{inner}" if text else inner] = value
    needed = {"language_model.embed_tokens.weight", "rm_head.0.weight"}
    check_state_dict_keys(key, pretrained, needed - renamed.keys(), ())
    return renamed


def _head(weights: dict[str, Tensor]) -> nn.Sequential:
    """Return the head with the authors' names of layers, of which the dropout does nothing here."""
    shapes = [weights[f"{layer}.weight"].shape for layer in (0, 3, 5)]
    first, second, last = (nn.Linear(inputs, outputs) for outputs, inputs in shapes)
    head = nn.Sequential(first, nn.ReLU(), nn.Identity(), second, nn.ReLU(), last)
    head.load_state_dict(weights)
    return head.requires_grad_(False)
