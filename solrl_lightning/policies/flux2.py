"""FLUX.2 [klein].

Latents are [B, C, H / 16, W / 16]: 2 x 2 patches of the autoencoder's, normalised by its batch-norm statistics. The
transformer takes them as a sequence.
"""

from typing import Any

import numpy as np
import torch
from diffusers import Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.schedulers import FLOW_MATCHING


class Flux2(PipelineAdapter):
    """Adapter of ``Flux2KleinPipeline``; arguments are as in `PipelineAdapter`."""

    pipeline_class = Flux2KleinPipeline
    encoders = ("text_encoder", "tokenizer")
    schedulers = FLOW_MATCHING
    latents_per_token = 2

    def __init__(self, pretrained: str, resolution: int, **others: Any) -> None:
        super().__init__(pretrained, resolution, **others)
        if self.guidance_scale != 1 and self.pipeline.config.get("is_distilled"):
            raise UserError(
                f"model.guidance_scale={self.guidance_scale} is invalid: {pretrained} is distilled, so its pipeline "
                "does not guide. Set model.guidance_scale=1."
            )
        side = resolution // self.pixels_per_token
        self.latent_shape = (self.transformer.config.in_channels, side, side)
        self._image_ids = Flux2KleinPipeline._prepare_latent_ids(torch.empty(1, *self.latent_shape)).to(self.device)
        text = torch.empty(1, self.max_sequence_length, 0)
        self._text_ids = Flux2KleinPipeline._prepare_text_ids(text).to(self.device)

    def encode_uncached(self, prompts: list[str], device: torch.device) -> Conditioning:
        """Return ``prompt_embeds`` [P, L, 3 D]: three layers of Qwen3. Padding is not masked."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt=prompts, device=device, max_sequence_length=self.max_sequence_length
        )
        return {"prompt_embeds": embeds}

    def sigmas(self, steps: int) -> Tensor:
        """Return the levels of the pipeline's scheduler, with its shift by image tokens and steps."""
        _, height, width = self.latent_shape
        return self.scheduler_sigmas(
            steps, np.linspace(1.0, 1 / steps, steps), compute_empirical_mu(height * width, steps)
        )

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        embeds = conditioning["prompt_embeds"]
        timestep = (1000 * sigma.to(self.device)).to(embeds.dtype).expand(len(x))  # rounded as the pipeline does
        output = transformer(
            hidden_states=Flux2KleinPipeline._pack_latents(x.to(embeds.dtype)),
            encoder_hidden_states=embeds,
            timestep=timestep / 1000,
            img_ids=self._image_ids,
            txt_ids=self._text_ids,
            return_dict=False,
        )
        return output[0].float().mT.unflatten(2, x.shape[2:])

    def unscale_latents(self, x: Tensor, vae: Any) -> Tensor:
        statistics = self.pipeline.vae.bn
        mean, variance = (value.float()[:, None, None] for value in (statistics.running_mean, statistics.running_var))
        std = torch.sqrt(variance + self.pipeline.vae.config.batch_norm_eps)
        return Flux2KleinPipeline._unpatchify_latents(x * std + mean)
