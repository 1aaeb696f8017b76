"""FLUX.1: how its pipeline folder encodes prompts, predicts velocities and decodes latents.

Everything is taken from diffusers' ``FluxPipeline``; only the denoising loop is not, because the rollout owns it.
Latents stay packed, [B, S, C] with S image tokens of C = 4 x latent channels, from the noise to the decoder.
"""

import copy
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from peft import LoraConfig
from torch import Tensor, nn

from solrl_lightning.policies.bf16 import has_bf16_units, use_fp32_products
from solrl_lightning.policies.loading import load_pipeline
from solrl_lightning.rollout.seeds import noise

Conditioning = dict[str, Tensor]


class Flux1:
    """A ``FluxPipeline`` folder as a policy.

    Args:
        pretrained: hub id, local folder, or ``tiny`` for the embedded model.
        resolution: side of the square images in pixels.
        max_sequence_length: tokens of the T5 prompt embedding.
        guidance: the value fed to the guidance embedding of models that have one (FLUX.1-dev).
        decode_batch: images that the autoencoder decodes at once; its activations outgrow caches and memory first.
        device: where the transformer, the encoders and the autoencoder live.

    Raises:
        UserError: ``pretrained`` is missing or is no FLUX.1 pipeline.
    """

    def __init__(
        self,
        pretrained: str,
        resolution: int,
        max_sequence_length: int,
        guidance: float,
        decode_batch: int,
        device: str | torch.device = "cpu",
    ) -> None:
        folder = str(files("solrl_lightning") / "assets" / "tiny") if pretrained == "tiny" else pretrained
        self.pipeline = load_pipeline(FluxPipeline, folder)
        self.resolution, self.max_sequence_length, self.guidance = resolution, max_sequence_length, guidance
        self.decode_batch = decode_batch
        self.device = torch.device(device)
        self.transformer = self.pipeline.transformer.requires_grad_(False).eval()
        if self.device.type == "cpu" and not has_bf16_units():
            use_fp32_products(self.transformer)
        # The encoders and the autoencoder are frozen and run once per prompt or image, in float32 as published.
        for component in (self.pipeline.text_encoder, self.pipeline.text_encoder_2, self.pipeline.vae):
            component.requires_grad_(False).eval().to(self.device)
        self.pipeline.vae.to(memory_format=torch.channels_last)
        self.transformer.to(self.device)
        side = resolution // (self.pipeline.vae_scale_factor * 2)  # tokens along one side
        channels = self.transformer.config.in_channels
        self.latent_shape = (side * side, channels)
        self._latent_grid = (channels // 4, side * 2, side * 2)
        self._image_ids = FluxPipeline._prepare_latent_image_ids(1, side, side, self.device, torch.float32)

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> Conditioning:
        """Embeddings of P prompts: ``prompt_embeds`` [P, L, D] and ``pooled`` [P, D'], in the transformer's dtype."""
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompts, prompt_2=None, device=self.device, max_sequence_length=self.max_sequence_length
        )
        dtype = self.transformer.dtype
        return {"prompt_embeds": embeds.to(dtype), "pooled": pooled.to(dtype)}

    def noise(self, seeds: Tensor) -> Tensor:
        """float32 [B, S, C] initial latents of the candidates, each a function of its seed alone."""
        spatial = noise(seeds, self._latent_grid)
        return FluxPipeline._pack_latents(spatial, *spatial.shape).to(self.device)

    def sigmas(self, steps: int) -> Tensor:
        """float32 [T + 1] noise levels from 1 down to 0, by the pipeline's own scheduler with its resolution shift."""
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        shift = {
            ours: scheduler.config[theirs]
            for ours, theirs in (
                ("base_seq_len", "base_image_seq_len"),
                ("max_seq_len", "max_image_seq_len"),
                ("base_shift", "base_shift"),
                ("max_shift", "max_shift"),
            )
        }
        mu = calculate_shift(self.latent_shape[0], **shift)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        return scheduler.sigmas.float()

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """float32 [B, S, C] velocity (noise minus image) at latents ``x`` [B, S, C] and levels ``sigma`` [B] or []."""
        dtype = conditioning["prompt_embeds"].dtype
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full((len(x),), self.guidance, device=self.device)
        text_ids = torch.zeros(conditioning["prompt_embeds"].shape[1], 3, device=self.device)
        output = transformer(
            hidden_states=x.to(dtype),
            encoder_hidden_states=conditioning["prompt_embeds"],
            pooled_projections=conditioning["pooled"],
            timestep=sigma.to(self.device, dtype).expand(len(x)),
            guidance=guidance,
            img_ids=self._image_ids,
            txt_ids=text_ids,
            return_dict=False,
        )
        return output[0].float()

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        """float32 [B, 3, H, W] images in [0, 1] of latents ``x`` [B, S, C]."""
        vae = self.pipeline.vae
        latents = FluxPipeline._unpack_latents(x, self.resolution, self.resolution, self.pipeline.vae_scale_factor)
        latents = (latents / vae.config.scaling_factor + vae.config.shift_factor).to(vae.dtype)
        images = [vae.decode(part).sample.float() for part in latents.split(self.decode_batch)]
        return (torch.cat(images) / 2 + 0.5).clamp(0, 1)

    def save_lora(self, folder: Path, state: dict[str, Tensor], config: LoraConfig) -> None:
        """Writes a LoRA that plain diffusers loads with ``pipe.load_lora_weights(folder)``."""
        FluxPipeline.save_lora_weights(
            folder, transformer_lora_layers=state, transformer_lora_adapter_metadata=config.to_dict()
        )
