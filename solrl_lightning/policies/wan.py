"""Wan 2.1, text to video.

Latents are [B, C, F', H / 8, W / 8]: the autoencoder is causal, so the first of F' latent frames is the first frame of
the video, and each other one is four frames. ``decode`` returns [B, F, 3, H, W] with F = 4 (F' - 1) + 1.
"""

import re
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from torch import Tensor, nn
from torch.nn import functional as F

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import UserError
from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.schedulers import FLOW_MATCHING_OR_UNIPC, noise_levels

_ATTENTIONS, _LINEAR = {"attn1": "self_attn", "attn2": "cross_attn"}, {"q": "q", "k": "k", "v": "v", "out.0": "o"}
# Of diffusers, and of the authors' code.
_NAMES = {f"{a}.to_{b}": f"{_ATTENTIONS[a]}.{_LINEAR[b]}" for a in _ATTENTIONS for b in _LINEAR} | {
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
_IN_BLOCK = re.compile(rf"(blocks\.\d+)\.({'|'.join(map(re.escape, _NAMES))})\.(lora_[AB]\.weight)")


class Wan(PipelineAdapter):
    """Adapter of ``WanPipeline`` with one transformer.

    Args:
        num_frames: of the video, 1 more than a multiple of 4.
        others: see ``PipelineAdapter``.
    """

    pipeline_class = WanPipeline
    encoders = ("text_encoder", "tokenizer")
    schedulers = FLOW_MATCHING_OR_UNIPC
    text_width = "text_dim"

    def __init__(self, pretrained: str, resolution: int, *, num_frames: int, **others: Any) -> None:
        super().__init__(pretrained, resolution, **others)
        latent_frames, rest = divmod(num_frames - 1, self.pipeline.vae_scale_factor_temporal)
        if rest:
            raise UserError(
                f"model.num_frames={num_frames} is invalid: it must be 1 more than a multiple of "
                f"{self.pipeline.vae_scale_factor_temporal}. Set model.num_frames={num_frames - rest}."
            )
        channels, height, width = self.latent_shape
        self.latent_shape = (channels, latent_frames + 1, height, width)

    @property
    def pixels_per_latent(self) -> int:
        return self.pipeline.vae_scale_factor_spatial

    @property
    def pixels_per_token(self) -> int:
        return self.pixels_per_latent * self.transformer.config.patch_size[-1]

    def encode_uncached(self, prompts: list[str], device: torch.device) -> dict[str, list[Tensor]]:
        """Return ``prompt_embeds`` of UMT5, P tensors [L_i, D] without padding, which the pipeline sets to 0."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt=prompts,
            do_classifier_free_guidance=False,
            device=device,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": [row[row.any(-1)] for row in embeds]}

    def encode(self, prompts: list[Prompt]) -> Conditioning:
        """Return ``prompt_embeds`` [P, L, D]; the transformer attends to the zeros up to ``max_sequence_length``."""
        embeds = super().encode(prompts)["prompt_embeds"]
        return {"prompt_embeds": F.pad(embeds, (0, 0, 0, self.max_sequence_length - embeds.shape[1]))}

    def sigmas(self, steps: int) -> Tensor:
        """Return the levels of the pipeline's scheduler; of a multistep one, as UniPC, up to 1e-6: the first is 1."""
        scheduler = self.pipeline.scheduler
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):  # its config may have UniPC's keys still
            return self.scheduler_sigmas(steps)
        uniform = np.linspace(1, 1 / scheduler.config.num_train_timesteps, steps + 1)[:-1]
        scheduler = FlowMatchEulerDiscreteScheduler(shift=scheduler.config.flow_shift)
        scheduler.set_timesteps(sigmas=uniform)
        return noise_levels(scheduler)

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        embeds = conditioning["prompt_embeds"]
        output = transformer(
            hidden_states=x.to(embeds.dtype),
            timestep=(1000 * sigma.to(self.device)).expand(len(x)),
            encoder_hidden_states=embeds,
            return_dict=False,
        )
        return output[0].float()

    def named_in_files(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under the authors' names, which diffusers and ComfyUI read; only blocks have such."""
        matches = {name: _IN_BLOCK.fullmatch(name) for name in state}
        if not all(matches.values()):
            return super().named_in_files(state)
        return {f"diffusion_model.{m[1]}.{_NAMES[m[2]]}.{m[3]}": state[name] for name, m in matches.items() if m}

    def decode_latents(self, x: Tensor, vae: Any) -> Tensor:
        """Return [B, F, 3, H, W] frames in [-1, 1] of latents ``x`` [B, *latent_shape]."""
        return super().decode_latents(x, vae).transpose(1, 2)
