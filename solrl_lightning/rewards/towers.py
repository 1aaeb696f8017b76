"""What rewards made of two towers, one for images and one for text, share: the cosine of the two embeddings.

Shapes: B images, U different prompts, D numbers per embedding.
"""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_lightning.rewards.base import Reward, unique_prompts
from solrl_lightning.rewards.loading import floating_dtype, load_clip

_CHUNK = 32  # images or texts per forward pass; so many images of 1024 x 1024 are 0.4 GB in float32


class TwoTowers(Reward):
    """A reward that is a function of the cosine between an image's and a text's embedding.

    Not a ``Module``: train() of the run's LightningModule, its checkpoints and its optimiser never reach the weights.
    """

    device: torch.device
    dtype: torch.dtype  # of weights and activations; embeddings are compared in float32

    @abstractmethod
    def embed_images(self, images: Tensor) -> Tensor:
        """[B, D] of images [B, 3, H, W] in [0, 1] on the reward's device."""

    @abstractmethod
    def embed_texts(self, prompts: list[str]) -> Tensor:
        """[U, D]."""

    def cosine(self, images: Tensor, prompts: list[str]) -> Tensor:
        """float32 [B]: each image against its prompt; equal prompts are embedded once."""
        texts, place = unique_prompts(prompts)
        seen = torch.cat([self.embed_images(part.to(self.device)).float() for part in images.split(_CHUNK)])
        parts = [texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK)]
        meant = torch.cat([self.embed_texts(part).float() for part in parts])[place.to(self.device)]
        return (F.normalize(seen, dim=-1) * F.normalize(meant, dim=-1)).sum(-1)


class TransformersCLIP(TwoTowers):
    """The two towers of a transformers CLIP, with its processor's preprocessing.

    Args:
        pretrained: hub id or folder of the weights.
        processor: hub id or folder of the image processor and the tokenizer.
        device: where to score.
        dtype: of weights and activations.
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
        # Read before the cast: in bfloat16 the published scale of 100 would be 98.9.
        self.logit_scale = float(model.logit_scale.detach().exp())
        self.model: Any = model.eval().requires_grad_(False).to(self.device, self.dtype)

    def embed_images(self, images: Tensor) -> Tensor:
        pixels = self._preprocess(images).to(self.dtype)
        return self.model.get_image_features(pixel_values=pixels).pooler_output

    def embed_texts(self, prompts: list[str]) -> Tensor:
        length = self.model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(prompts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        return self.model.get_text_features(**tokens.to(self.device)).pooler_output
