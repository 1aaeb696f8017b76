"""SANA, without the "complex human instruction", as in the published training.

Latents are [B, C, H / 32, W / 32]: the autoencoder (DC-AE) compresses 32-fold.
"""

from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaPipeline
from torch import Tensor, nn

from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.sana_checkpoint import load_linear_ffn
from solrl_lightning.policies.schedulers import noise_levels


class Sana(PipelineAdapter):
    """Adapter of ``SanaPipeline``.

    Args:
        flow_shift: of the noise levels. 1, uniform levels, as published; the checkpoint's own scheduler has 3.
        transformer_weights: a LinearFFN checkpoint (.pth file or hub id) over the pipeline's transformer weights.
        others: see ``PipelineAdapter``.
    """

    pipeline_class = SanaPipeline
    encoders = ("text_encoder", "tokenizer")
    text_width = "caption_channels"

    def __init__(
        self,
        pretrained: str,
        resolution: int,
        *,
        flow_shift: float,
        transformer_weights: str | None = None,
        **others: Any,
    ) -> None:
        self.transformer_weights, self.flow_shift = transformer_weights, flow_shift
        super().__init__(pretrained, resolution, **others)

    def replace_weights(self) -> None:
        if self.transformer_weights is not None:
            self._note_weights(load_linear_ffn(self.transformer_weights, self.pipeline.transformer))

    @property
    def euler_shift(self) -> float:  # type: ignore[override]
        """As published; the pipeline's scheduler has several steps, and shift 3."""
        return self.flow_shift

    @property
    def call_options(self) -> dict[str, Any]:
        """As in the base class, without the text before a prompt, and without another size that is then resized."""
        return super().call_options | {"complex_human_instruction": None, "use_resolution_binning": False}

    def encode_uncached(self, prompts: list[str], device: torch.device) -> Conditioning:
        """Return ``prompt_embeds`` [P, L, D] of Gemma and ``prompt_mask`` int64 [P, L], which is 0 at padding."""
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            prompt=prompts,
            do_classifier_free_guidance=False,
            device=device,
            max_sequence_length=self.max_sequence_length,
            complex_human_instruction=None,
        )
        return {"prompt_embeds": embeds, "prompt_mask": mask}

    def embedding_like(self) -> Conditioning:
        mask = torch.empty(self.max_sequence_length, dtype=torch.int64, device="meta")
        return super().embedding_like() | {"prompt_mask": mask}

    def sigmas(self, steps: int) -> Tensor:
        scheduler = FlowMatchEulerDiscreteScheduler(shift=self.euler_shift)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
        return noise_levels(scheduler)

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        config = self.transformer.config
        output = transformer(
            hidden_states=x.to(conditioning["prompt_embeds"].dtype),
            encoder_hidden_states=conditioning["prompt_embeds"],
            encoder_attention_mask=conditioning["prompt_mask"],
            timestep=(1000 * sigma.to(self.device)).expand(len(x)) * config.timestep_scale,
            return_dict=False,
        )[0]
        if config.out_channels // 2 == config.in_channels:  # the second half is a learned variance, unused by flows
            output = output.chunk(2, dim=1)[0]
        return output.float()

    def unscale_latents(self, x: Tensor, vae: Any) -> Tensor:
        return x.to(vae.dtype) / vae.config.scaling_factor
