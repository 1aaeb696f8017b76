"""Qwen-Image-Edit: Qwen-Image with an input image, which the text encoder sees and the transformer reads.

The square in the middle of the input image has the resolution of the output. Its latents [B, S, C] follow the noisy
ones; only the noisy ones have a velocity.
"""

import torch
from diffusers import QwenImageEditPipeline
from PIL.Image import Image
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from solrl_lightning.data.input_images import load_square
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import UserError
from solrl_lightning.machine.memory import retry_with_empty_cache
from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.guidance import guide
from solrl_lightning.policies.qwen_image import QwenImage, with_conditional_norm

_VISION_TOKEN = 28  # pixels of a side of the square that the text encoder reads as a token
_NEGATIVE = "negative_"
_EMBED_BATCH = 8  # images that the text encoder reads at once


class QwenImageEdit(QwenImage):
    """Adapter of ``QwenImageEditPipeline``; arguments are as in `PipelineAdapter`.

    ``max_sequence_length`` counts the tokens beside the image's.
    """

    pipeline_class = QwenImageEditPipeline
    encoders = ("text_encoder", "tokenizer", "processor")

    @property
    def prompt_length(self) -> int:
        height, width = smart_resize(self.resolution, self.resolution, factor=_VISION_TOKEN)
        return height * width // _VISION_TOKEN**2 + self.max_sequence_length

    def embedding_like(self) -> Conditioning:
        like = super().embedding_like()
        negative = {_NEGATIVE + name: value for name, value in like.items()} if self.guidance_scale != 1 else {}
        return like | negative | {"image_latents": torch.empty(self.latent_shape, device="meta")}

    def embedding_settings(self) -> dict[str, object]:
        return super().embedding_settings() | {"pixels": self.resolution, "guided": self.guidance_scale != 1}

    def embedding_name(self, prompt: Prompt) -> str:
        return f"{prompt.text} {prompt.image_digest}"

    def encode_unconditional(self) -> Conditioning:
        """Return nothing: the embedding of the empty prompt depends on the image, so it is a part of ``encode``."""
        return {}

    def encode_prompts(self, prompts: list[Prompt], device: torch.device) -> dict[str, list[Tensor]]:
        """Return ``prompt_embeds`` of Qwen2.5-VL, P tensors [L_i, D] without padding, of the texts with their images.

        With guidance also ``negative_prompt_embeds``, of the empty text with each image.
        """
        images = [load_square(_file(prompt), self.resolution) for prompt in prompts]
        rows = {"prompt_embeds": self._embed([prompt.text for prompt in prompts], images, device)}
        if self.guidance_scale != 1:
            rows[f"{_NEGATIVE}prompt_embeds"] = self._embed([""] * len(prompts), images, device)
        return rows

    def encode(self, prompts: list[Prompt]) -> Conditioning:
        """Encode as ``QwenImage.encode``, with ``image_latents`` [P, S, C] of the input images.

        With guidance also ``negative_prompt_embeds`` and its mask, of the empty text with each image.
        """
        conditioning = super().encode(prompts)
        if self.guidance_scale != 1:
            conditioning |= self.padded(conditioning, f"{_NEGATIVE}prompt_embeds")
        if not self.random:
            files = list(map(_file, prompts))
            latents = {file: self._latents(load_square(file, self.resolution)) for file in dict.fromkeys(files)}
            conditioning["image_latents"] = torch.cat([latents[file] for file in files]).to(self.transformer.dtype)
        return conditioning

    def images(self, x: Tensor, conditioning: Conditioning) -> list[Tensor]:
        return [x, conditioning["image_latents"]]

    def guided_velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the guided velocity of ``QwenImage``, from the velocity without text but with the same image."""
        others = {name: value for name, value in conditioning.items() if not name.startswith(_NEGATIVE)}
        negative = {name: conditioning.get(_NEGATIVE + name, value) for name, value in others.items()}
        velocity = guide(self.velocity, negative, self.guidance_scale, with_conditional_norm)
        return velocity(transformer, x, sigma, others)

    def _embed(self, texts: list[str], images: list[Image], device: torch.device) -> list[Tensor]:
        rows: list[Tensor] = []
        for first in range(0, len(texts), _EMBED_BATCH):
            part = slice(first, first + _EMBED_BATCH)
            embeds, mask = self.pipeline.encode_prompt(prompt=texts[part], image=images[part], device=device)
            mask = torch.ones_like(embeds[..., 0]) if mask is None else mask
            rows += [row[real.bool()][: self.prompt_length] for row, real in zip(embeds, mask, strict=True)]
        return rows

    @torch.no_grad()
    def _latents(self, image: Image) -> Tensor:
        """Return [1, S, C] normalised latents of an image."""
        vae, side = self.pipeline.vae, self.resolution
        pixels = self.pipeline.image_processor.preprocess(image, side, side).unsqueeze(2).to(self.device, vae.dtype)
        latents: Tensor = retry_with_empty_cache(lambda: self.pipeline._encode_vae_image(pixels, generator=None))
        batch, channels, _, height, width = latents.shape
        packed: Tensor = self.pipeline._pack_latents(latents, batch, channels, height, width)
        return packed


def _file(prompt: Prompt) -> str:
    """Return the path of the input image. Raises ``UserError`` for a prompt without one."""
    if prompt.input_image is None:
        raise UserError(
            f"the prompt {prompt.text!r} is invalid: this model edits an image, and the prompt has none. Give prompts "
            'as rows {"prompt": ..., "image": <file>} of a .jsonl file.'
        )
    return prompt.input_image
