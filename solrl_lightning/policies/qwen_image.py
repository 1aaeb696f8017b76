"""Qwen-Image.

Latents are packed, [B, S, C] with S image tokens of C = 4 x latent channels, from the noise to the decoder. The decoder
is for videos: its input is [B, C / 4, frames, H / 8, W / 8].
"""

from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import QwenImagePipeline
from torch import Tensor, nn
from torch.nn import functional as F

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.guidance import extrapolate, guide
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.schedulers import FLOW_MATCHING
from solrl_lightning.seeds import noise


class QwenImage(PipelineAdapter):
    """Adapter of ``QwenImagePipeline``; arguments are as in `PipelineAdapter`."""

    pipeline_class = QwenImagePipeline
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")
    schedulers = FLOW_MATCHING

    def __init__(self, pretrained: str, resolution: int, **others: Any) -> None:
        super().__init__(pretrained, resolution, **others)
        self._side = resolution // self.pixels_per_token
        self.latent_shape = (self._side**2, self.transformer.config.in_channels)

    @property
    def call_options(self) -> dict[str, Any]:
        """As in the base class, by the pipeline's names; it guides only if there is a negative prompt."""
        guidance = {"negative_prompt": ""} if self.guidance_scale != 1 else {}
        return {"true_cfg_scale": self.guidance_scale, "max_sequence_length": self.max_sequence_length} | guidance

    def encode_uncached(self, prompts: list[str], device: torch.device) -> dict[str, list[Tensor]]:
        """Return ``prompt_embeds`` of Qwen2.5-VL, P tensors [L_i, D] without padding."""
        embeds, mask = self.pipeline.encode_prompt(
            prompt=prompts, device=device, max_sequence_length=self.max_sequence_length
        )
        mask = torch.ones_like(embeds[..., 0]) if mask is None else mask
        return {"prompt_embeds": [row[real.bool()] for row, real in zip(embeds, mask, strict=True)]}

    def encode(self, prompts: list[Prompt]) -> Conditioning:
        """Return ``prompt_embeds`` [P, L, D], L = ``max_sequence_length``, and ``prompt_embeds_mask`` bool [P, L].

        One length for all prompts keeps the shapes that a compiled transformer has.
        """
        conditioning = super().encode(prompts)
        return conditioning | self.padded(conditioning, "prompt_embeds")

    def padded(self, conditioning: Conditioning, name: str) -> Conditioning:
        """Return the embedding ``name`` [P, prompt_length, D], and its mask."""
        embeds = conditioning[name]
        mask = conditioning.get(f"{name}_mask", torch.ones(embeds.shape[:2], dtype=torch.bool, device=self.device))
        missing = self.prompt_length - embeds.shape[1]
        return {name: F.pad(embeds, (0, 0, 0, missing)), f"{name}_mask": F.pad(mask, (0, missing))}

    @property
    def unused_layers(self) -> list[str]:
        """What makes the text's output of the last block, which nothing reads."""
        last = f"transformer_blocks.{len(self.transformer.transformer_blocks) - 1}"
        return [f"{last}.{layer}" for layer in ("attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")]

    def noise(self, seeds: Tensor) -> Tensor:
        spatial = noise(seeds, (self.latent_shape[1] // 4, self._side * 2, self._side * 2))
        return QwenImagePipeline._pack_latents(spatial, *spatial.shape).to(self.device)

    def sigmas(self, steps: int) -> Tensor:
        """Return the levels of the pipeline's scheduler: shifted by the number of image tokens, the last one before 0
        is 0.02.
        """
        return self.scheduler_sigmas(steps, np.linspace(1.0, 1 / steps, steps))

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        dtype, images = conditioning["prompt_embeds"].dtype, self.images(x, conditioning)
        output = transformer(
            hidden_states=torch.cat([image.to(dtype) for image in images], dim=1),
            encoder_hidden_states=conditioning["prompt_embeds"],
            encoder_hidden_states_mask=conditioning["prompt_embeds_mask"],
            timestep=(1000 * sigma.to(self.device)).to(dtype).expand(len(x)) / 1000,  # rounded as the pipeline does
            img_shapes=[[(1, self._side, self._side)] * len(images)] * len(x),
            return_dict=False,
        )
        return output[0][:, : x.shape[1]].float()

    def images(self, x: Tensor, conditioning: Conditioning) -> list[Tensor]:
        """Return latents [B, S, C] of each image that the transformer reads, the one to predict first."""
        return [x]

    def guided_velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the guided velocity, with each token rescaled to the norm of its conditional velocity."""
        velocity = guide(self.velocity, self.unconditional, self.guidance_scale, with_conditional_norm)
        return velocity(transformer, x, sigma, conditioning)

    def decode_latents(self, x: Tensor, vae: Any) -> Tensor:
        return super().decode_latents(x, vae)[:, :, 0]

    def unscale_latents(self, x: Tensor, vae: Any) -> Tensor:
        """Return [B, C, 1, H / 8, W / 8] latents of a video of one frame."""
        frames = QwenImagePipeline._unpack_latents(x, self.resolution, self.resolution, self.pipeline.vae_scale_factor)
        return super().unscale_latents(frames, vae)


def with_conditional_norm(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Return [B, S, C] extrapolated velocity, rescaled token by token to the norm of the conditional one.

    It is the guidance of ``QwenImagePipeline`` (its ``true_cfg_scale``).
    """
    combined = extrapolate(conditional, unconditional, scale)
    return combined * (conditional.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))
