"""FLUX.1.

Latents are packed, [B, S, C] with S image tokens of C = 4 x latent channels, from the noise to the decoder.
"""

from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.schedulers import FLOW_MATCHING
from solrl_lightning.seeds import noise


class Flux1(PipelineAdapter):
    """Adapter of ``FluxPipeline``.

    Args:
        guidance: the value fed to the guidance embedding of models that have one (FLUX.1-dev).
        others: see ``PipelineAdapter``.
    """

    pipeline_class = FluxPipeline
    encoders = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    schedulers = FLOW_MATCHING
    latents_per_token = 2

    def __init__(self, pretrained: str, resolution: int, *, guidance: float, **others: Any) -> None:
        super().__init__(pretrained, resolution, **others)
        if guidance != 1 and not self.transformer.config.guidance_embeds:
            raise UserError(
                f"model.guidance={guidance} is invalid: it is the value of a guidance embedding, which the transformer "
                f"of {pretrained} does not have. Set model.guidance=1."
            )
        self.guidance = guidance
        side = resolution // self.pixels_per_token
        channels = self.transformer.config.in_channels
        self.latent_shape = (side * side, channels)
        self._latent_grid = (channels // 4, side * 2, side * 2)
        self._image_ids = FluxPipeline._prepare_latent_image_ids(1, side, side, self.device, torch.float32)

    @property
    def call_options(self) -> dict[str, Any]:
        """As in the base class; the guidance is the embedding's."""
        return super().call_options | {"guidance_scale": self.guidance}

    def encode_uncached(self, prompts: list[str], device: torch.device) -> Conditioning:
        """Return ``prompt_embeds`` [P, L, D] of T5 and ``pooled`` [P, D'] of CLIP."""
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompts, prompt_2=None, device=device, max_sequence_length=self.max_sequence_length
        )
        return {"prompt_embeds": embeds, "pooled": pooled}

    def embedding_like(self) -> Conditioning:
        pooled = torch.empty(self.transformer.config.pooled_projection_dim, device="meta")
        return super().embedding_like() | {"pooled": pooled}

    def noise(self, seeds: Tensor) -> Tensor:
        spatial = noise(seeds, self._latent_grid)
        return FluxPipeline._pack_latents(spatial, *spatial.shape).to(self.device)

    def sigmas(self, steps: int) -> Tensor:
        """Return the levels of the pipeline's scheduler, with its resolution shift."""
        return self.scheduler_sigmas(steps, np.linspace(1.0, 1 / steps, steps))

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        dtype = conditioning["prompt_embeds"].dtype
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full((len(x),), self.guidance, device=self.device)
        text_ids = torch.zeros(conditioning["prompt_embeds"].shape[1], 3, device=self.device)
        output = transformer(
            hidden_states=x.to(dtype),
            encoder_hidden_states=conditioning["prompt_embeds"],
            pooled_projections=conditioning["pooled"],
            timestep=(1000 * sigma.to(self.device)).to(dtype).expand(len(x)) / 1000,  # rounded as the pipeline does
            guidance=guidance,
            img_ids=self._image_ids,
            txt_ids=text_ids,
            return_dict=False,
        )
        return output[0].float()

    def unscale_latents(self, x: Tensor, vae: Any) -> Tensor:
        factor = self.pipeline.vae_scale_factor
        return super().unscale_latents(FluxPipeline._unpack_latents(x, self.resolution, self.resolution, factor), vae)
