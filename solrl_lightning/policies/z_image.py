"""Z-Image.

The transformer takes lists of latents and of captions. It appends a learned token to every caption up to a multiple of
32 and attends to these tokens, so a caption is not padded before.
"""

from typing import Any

import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas
from torch import Tensor, nn
from torch.nn import functional as F

from solrl_lightning.errors import UserError
from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.schedulers import FLOW_MATCHING


class ZImage(PipelineAdapter):
    """Adapter of ``ZImagePipeline``; arguments are as in `PipelineAdapter`.

    Its ``guidance_scale`` is the usual one, 1 more than in the pipeline, which disables guidance with 0.
    """

    pipeline_class = ZImagePipeline
    encoders = ("text_encoder", "tokenizer")
    schedulers = FLOW_MATCHING
    text_width = "cap_feat_dim"
    latents_per_token = 2

    def __init__(self, pretrained: str, resolution: int, max_sequence_length: int, **others: Any) -> None:
        super().__init__(pretrained, resolution, max_sequence_length, **others)
        self.transformer.__class__ = FixedLengthTransformer
        self.transformer.caption_tokens = max_sequence_length + -max_sequence_length % SEQ_MULTI_OF
        positions, side, _ = self.transformer.config.axes_lens
        longest = (positions - 2) // SEQ_MULTI_OF * SEQ_MULTI_OF  # a caption begins at 1, and the image follows it
        sizes = {"model.max_sequence_length": (max_sequence_length, longest)}
        sizes |= {"model.resolution": (resolution, side * self.pixels_per_token)}
        for key, (size, most) in sizes.items():
            if size > most:
                rule = f"the positions of the transformer (axes_lens) end at {most}"
                raise UserError(f"{key}={size} is invalid: {rule}. Set {key}={most}.")

    @property
    def call_options(self) -> dict[str, Any]:
        """As in the base class, in the pipeline's scale."""
        return super().call_options | {"guidance_scale": self.guidance_scale - 1}

    def encode_uncached(self, prompts: list[str], device: torch.device) -> dict[str, list[Tensor]]:
        """Return ``prompt_embeds`` of Qwen3, P tensors [L_i, D] without padding."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt=list(prompts),  # the pipeline writes its template into this list
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds}

    def sigmas(self, steps: int) -> Tensor:
        """Return the levels of the pipeline's scheduler, whose shift is a number as published."""
        return self.scheduler_sigmas(steps, get_default_z_image_sigmas(steps))  # uniform ones, rounded to float32

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        embeds, mask = conditioning["prompt_embeds"], conditioning.get("prompt_embeds_mask")
        lengths = [embeds.shape[1]] * len(x) if mask is None else mask.sum(1).tolist()
        output = transformer(
            x=list(x.to(embeds.dtype)[:, :, None]),  # videos of one frame
            t=((1000 - 1000 * sigma.to(self.device)) / 1000).expand(len(x)),  # rounded as the pipeline does
            cap_feats=[row[:length] for row, length in zip(embeds, lengths, strict=True)],
            return_dict=False,
        )
        return -torch.stack(output[0]).float()[:, :, 0]  # its time is 0 at the noise, 1 at the image


class FixedLengthTransformer(ZImageTransformer2DModel):
    """The transformer with the captions of every batch padded to ``caption_tokens``, and masked.

    The published one pads to the longest caption of the batch: another shape for compiled blocks in most batches, with
    a mask or without.
    """

    caption_tokens: int

    def _prepare_sequence(self, feats: Any, pos_ids: Any, inner_pad_mask: Any, pad_token: Tensor, *others: Any) -> Any:
        tokens, rotations, mask, *rest = super()._prepare_sequence(feats, pos_ids, inner_pad_mask, pad_token, *others)
        if pad_token is self.cap_pad_token:  # others are image tokens, of which all rows have the same number
            tokens, rotations, mask = lengthen(tokens, rotations, mask, self.caption_tokens)
        return tokens, rotations, mask, *rest

    def _build_unified_sequence(self, x: Tensor, *others: Any) -> Any:
        tokens, rotations, mask, noise_mask = super()._build_unified_sequence(x, *others)
        return *lengthen(tokens, rotations, mask, x.shape[1] + self.caption_tokens), noise_mask


FixedLengthTransformer.__name__ = ZImageTransformer2DModel.__name__  # in saved configurations and model cards


def lengthen(x: Tensor, rotations: Tensor, mask: Tensor | None, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad tokens [B, S, D], their rotations [B, S, ...] and the mask [B, S], None if all are real, to ``length``."""
    missing = length - x.shape[1]
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    return F.pad(x, (0, 0, 0, missing)), F.pad(rotations, (0, 0, 0, missing)), F.pad(mask, (0, missing))
