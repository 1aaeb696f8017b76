"""Base class of the models whose autoencoder is for videos: Wan, and Qwen-Image with videos of one frame."""

from typing import Any

import torch
from diffusers import AutoencoderTiny
from torch import Tensor

from solrl_lightning.errors import UserError
from solrl_lightning.policies.pipeline import PipelineAdapter


class VideoPipelineAdapter(PipelineAdapter):
    """A pipeline with an autoencoder for videos; arguments are those of `PipelineAdapter`."""

    def unscale_latents(self, x: Tensor, vae: Any) -> Tensor:
        """Return the input of ``vae`` for latents [B, C, F, H, W], normalised by the statistics of its config file."""
        mean, std = (
            torch.tensor(vae.config[name], device=x.device).view(-1, 1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        return x * std + mean

    def _preview_decoder(self, pretrained: str) -> AutoencoderTiny:
        raise UserError(
            f"model.preview_decoder={pretrained} is invalid: an AutoencoderTiny of diffusers decodes pictures, and "
            "these latents are those of a video. Set model.preview_decoder=null."
        )
