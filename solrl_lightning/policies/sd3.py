"""Stable Diffusion 3 and 3.5.

Latents are [B, C, H / 8, W / 8].
"""

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.schedulers import FLOW_MATCHING

CLIP_TOKENS = 77  # tokens of both CLIPs, which precede T5's


class SD3(PipelineAdapter):
    """Adapter of ``StableDiffusion3Pipeline``; arguments are as in `PipelineAdapter`."""

    pipeline_class = StableDiffusion3Pipeline
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
    optional = ("text_encoder_3", "tokenizer_3")
    schedulers = FLOW_MATCHING

    def encode_uncached(self, prompts: list[str], device: torch.device) -> Conditioning:
        """Return ``prompt_embeds`` [P, 77 + L, D], the CLIPs side by side, then T5; ``pooled`` [P, D'] of the CLIPs."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompts,
            prompt_2=None,
            prompt_3=None,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds, "pooled": pooled}

    @property
    def prompt_length(self) -> int:
        return CLIP_TOKENS + self.max_sequence_length

    def embedding_like(self) -> Conditioning:
        pooled = torch.empty(self.transformer.config.pooled_projection_dim, device="meta")
        return super().embedding_like() | {"pooled": pooled}

    def sigmas(self, steps: int) -> Tensor:
        """Return the levels of the pipeline's scheduler: shift 3, and the last level above 0 is the lowest it was
        trained at.
        """
        return self.scheduler_sigmas(steps)

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        output = transformer(
            hidden_states=x.to(conditioning["prompt_embeds"].dtype),
            timestep=(1000 * sigma.to(self.device)).expand(len(x)),  # in float32, as from the scheduler
            encoder_hidden_states=conditioning["prompt_embeds"],
            pooled_projections=conditioning["pooled"],
            return_dict=False,
        )
        return output[0].float()
