"""reward=vlm_local: a vision-language model of transformers answers a question, as in ``vlm``, in this process.

The reward is the expected value of the answer under the probabilities of the first token (VQAScore, arXiv 2404.01291,
equation 1, here without the probability of other tokens).

Shapes: B images, V tokens of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from solrl_lightning.artifacts.complete import check_complete, note_unused, reading
from solrl_lightning.data.input_images import load_square
from solrl_lightning.data.prompt import INPUT_IMAGE
from solrl_lightning.errors import UserError
from solrl_lightning.options.rules import Count
from solrl_lightning.rewards.answers import LEAST, Answers, check_answered, spellings
from solrl_lightning.rewards.base import Metadata, Reward
from solrl_lightning.rewards.loading import floating_dtype, load_weights, read_parts


class LocalVLMReward(Reward):
    """Scores by any model that ``AutoModelForImageTextToText`` loads and whose processor has a chat template.

    Args:
        pretrained: hub id or folder of the model and its processor.
        question: text after the image, or the prompt's input image and the image; ``{prompt}`` stands for the prompt.
        answers: value of each answer, a word without regard to case.
        device: where to score.
        dtype: of weights and activations.
        batch: images per forward pass.

    Raises:
        UserError: a file is missing or damaged, or two answers begin with the same token.
    """

    name = "vlm_local"

    def __init__(
        self,
        pretrained: str,
        question: str,
        answers: Answers,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = torch.bfloat16,
        batch: Count = 4,
    ) -> None:
        super().__init__(device)
        self.dtype, self.batch, self.question = floating_dtype(self.name, dtype), batch, question
        key, kind = "reward.vlm_local.pretrained", "vision-language model"
        options = dict(padding_side="left", trust_remote_code=False)  # else transformers asks on the terminal
        parts = read_parts(key, pretrained, "config.json", kind, AutoProcessor, chats=True, **options)
        self.processor = parts[0]
        self.processor.chat_template = self.processor.chat_template or self.processor.tokenizer.chat_template
        check_complete(key, pretrained, PreTrainedModel)
        model, info = load_weights(AutoModelForImageTextToText, key, pretrained, kind, self.dtype)
        note_unused(pretrained, info["unexpected_keys"])
        self.model: Any = model.eval().requires_grad_(False).to(self.device)
        self.pretrained, self.answers = pretrained, [*map(str, answers)]
        with reading(f"{key}={pretrained} is invalid"):
            self.tokens = first_tokens(self.processor.tokenizer, self.answers)
        self.values = torch.tensor([float(value) for value in answers.values()], device=self.device)

    def try_out(self, image: Tensor, prompt: str, metadata: Metadata) -> None:
        with reading(
            f"reward.{self.name}.pretrained={self.pretrained} is invalid: it cannot read a picture and a prompt"
        ):
            score = self.score(image[None], [prompt], [metadata]).item()
        check_answered(score, f"reward.{self.name}", self.pretrained, prompt, self.answers)
        super().try_out(image, prompt, metadata)

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        levels = (images.float() * 255).round().byte().cpu()
        parts = [slice(first, first + self.batch) for first in range(0, len(prompts), self.batch)]
        return torch.cat([self._score(levels[part], prompts[part], metadata[part]) for part in parts])

    def _score(self, levels: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        chats = []
        for image, prompt, row in zip(levels, prompts, metadata, strict=True):
            text = self.question.replace("{prompt}", prompt.replace("<|", "< |"))  # no special tokens of the chat
            pictures = [image]
            if INPUT_IMAGE in row:
                pictures.insert(0, pil_to_tensor(load_square(row[INPUT_IMAGE], image.shape[-1])))
            content: list[Any] = [{"type": "image", "image": picture} for picture in pictures]
            chats.append([{"role": "user", "content": [*content, {"type": "text", "text": text}]}])
        inputs = self.processor.apply_chat_template(
            chats, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
        )
        logits = self.model(**inputs.to(self.device, self.dtype), logits_to_keep=1).logits[:, -1].float()  # [B, V]
        likelihoods = logits.softmax(dim=-1)
        answers = torch.stack([likelihoods[:, numbers].sum(dim=1) for numbers in self.tokens], dim=1)
        total = answers.sum(dim=1)
        score: Tensor = (answers * self.values).sum(dim=1) / total
        return score.masked_fill(total <= LEAST, float("nan"))


def first_tokens(tokenizer: Any, answers: Sequence[str]) -> list[list[int]]:
    """Return the tokens that each answer can begin with: its spellings, also after a space."""
    tokens = []
    for answer in answers:
        forms = {space + word for word in spellings(answer) for space in ("", " ")}
        ids = (tokenizer(form, add_special_tokens=False).input_ids for form in sorted(forms))
        tokens.append(sorted({numbers[0] for numbers in ids if tokenizer.decode(numbers[:1]).strip()}))
    for index, (answer, numbers) in enumerate(zip(answers, tokens, strict=True)):
        for other, others in list(zip(answers, tokens, strict=True))[:index]:
            if shared := set(numbers) & set(others):
                token = tokenizer.decode(sorted(shared)[:1])
                raise UserError(
                    f"reward.vlm_local.answers is invalid: {other!r} and {answer!r} begin with the same token, "
                    f"{token!r}. Use answers that differ in their first letters, such as digits."
                )
    return tokens
