"""Base classes of rewards with an image tower and a text tower: the cosine of the two embeddings.

Shapes: B images, U unique prompts, D numbers per embedding.
"""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_lightning.rewards.base import Reward, unique_prompts
from solrl_lightning.rewards.loading import floating_dtype, load_clip

_CHUNK = 32  # images or texts per forward pass; 32 images of 1024 x 1024 take 0.4 GB in float32


class TwoTowers(Reward):
    """A reward that is a function of the cosine between an image's and a text's embedding.

    Not a ``Module``, so train() of the LightningModule, its checkpoints and its optimiser do not include the weights.
    """

    device: torch.device
    dtype: torch.dtype  # of weights and activations; embeddings are compared in float32

    @abstractmethod
    def embed_images(self, images: Tensor) -> Tensor:
        """Return embeddings [B, D] of images [B, 3, H, W] in [0, 1] on the reward's device."""

    @abstractmethod
    def embed_texts(self, prompts: list[str]) -> Tensor:
        """Return embeddings [U, D] of prompts."""

    def embeddings(self, images: Tensor) -> Tensor:
        """Return embeddings, float32 [B, D], of images [B, 3, H, W] in [0, 1] on any device."""
        return torch.cat([self.embed_images(part.to(self.device)).float() for part in images.split(_CHUNK)])

    def cosine(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Return cosines, float32 [B], of each image with its prompt. Embeds equal prompts once."""
        texts, place = unique_prompts(prompts)
        image_features = self.embeddings(images)
        parts = [texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK)]
        text_features = torch.cat([self.embed_texts(part).float() for part in parts])[place.to(self.device)]
        return (F.normalize(image_features, dim=-1) * F.normalize(text_features, dim=-1)).sum(-1)


class TransformersCLIP(TwoTowers):
    """A CLIP of transformers with the preprocessing of its processor.

    Args:
        pretrained, processor: hub ids or folders, of the weights, and of the image processor and the tokenizer.
        dtype: of weights and activations; on a GPU float32 is TF32, and bfloat16 and float16 are faster but round the
            scores more.
    """

    def __init__(
        self,
        pretrained: str,
        processor: str,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = torch.float32,
    ) -> None:
        self.device, self.dtype = torch.device(device), floating_dtype(self.name, dtype)
        model, self._tokenizer, self._preprocess = load_clip(self.name, pretrained, processor)
        # Read the scale before the cast: bfloat16 rounds the published 100 to 98.9.
        self.logit_scale = float(model.logit_scale.detach().exp())
        self.model: Any = model.eval().requires_grad_(False).to(self.device, self.dtype)

    def embed_images(self, images: Tensor) -> Tensor:
        pixels = self._preprocess(images).to(self.dtype)
        return self.model.get_image_features(pixel_values=pixels).pooler_output

    def embed_texts(self, prompts: list[str]) -> Tensor:
        length = self.model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(prompts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        return self.model.get_text_features(**tokens.to(self.device)).pooler_output
