"""The preview decoder: a tiny autoencoder in place of the model's own, for candidates that are only ranked.

``AutoencoderTiny`` of diffusers (TAESD, https://github.com/madebyollin/taesd) is a few convolutions, distilled from the
model's autoencoder. It reads the same latents; its pictures are softer.
"""

from typing import Any

import torch
from diffusers import AutoencoderTiny
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from huggingface_hub import hf_hub_download

from solrl_lightning.artifacts.complete import reading
from solrl_lightning.artifacts.hub import fetch, is_path
from solrl_lightning.errors import UserError
from solrl_lightning.policies.architectures import Component, random_component
from solrl_lightning.policies.loading import load_module

EMBEDDED = "preview_decoder"  # the embedded model's own, in that model's folder
CONFIG = "config.json"
_WIDTH = 64  # of every published TAESD


def load_preview_decoder(
    pretrained: str, dtype: torch.dtype, channels: int, compression: int, variant: str | None = None
) -> AutoencoderTiny:
    """Load the tiny autoencoder of a folder or hub id, frozen; of a folder with files of ``variant``, these.

    Its files do not name the model that it was distilled from, so ``channels`` and ``compression`` of the latents to
    decode are checked before its weights are downloaded.
    """
    with reading(f"model.preview_decoder={pretrained} is invalid"):
        hint = "Or do without: model.preview_decoder=null."
        folder = fetch(pretrained, CONFIG, key="model.preview_decoder", kind="AutoencoderTiny", hint=hint).parent
        _check(AutoencoderTiny.load_config(str(folder)), pretrained, channels, compression)
        if not is_path(pretrained):
            hf_hub_download(pretrained, SAFETENSORS_WEIGHTS_NAME)  # into the same folder
        return load_module(AutoencoderTiny, folder, dtype, variant)


def random_preview_decoder(
    device: torch.device, dtype: torch.dtype, channels: int, compression: int
) -> AutoencoderTiny:
    """Make an AutoencoderTiny with random weights, as large as the published ones."""
    halvings = compression.bit_length() - 1
    config = {
        "latent_channels": channels,
        "encoder_block_out_channels": [_WIDTH] * (halvings + 1),
        "decoder_block_out_channels": [_WIDTH] * (halvings + 1),
        "num_encoder_blocks": [1] + [3] * halvings,
        "num_decoder_blocks": [3] * halvings + [1],
    }
    return random_component(Component("diffusers", "AutoencoderTiny", config), device, dtype)


def _check(config: dict[str, Any], pretrained: str, channels: int, compression: int) -> None:
    blocks = config.get("decoder_block_out_channels") or config.get("block_out_channels") or "-"  # of AutoencoderKL
    shape = (config.get("latent_channels"), 2 ** (len(blocks) - 1))
    if config.get("_class_name") != "AutoencoderTiny" or shape != (channels, compression):
        raise UserError(
            f"model.preview_decoder must be an AutoencoderTiny of this model's latents, {channels} channels at "
            f"1/{compression} of the side; {pretrained} is a {config.get('_class_name')} of {shape[0]} channels at "
            f"1/{shape[1]}. docs/models names those that fit."
        )
