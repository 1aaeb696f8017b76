"""FLUX.1 pipelines of the real classes, smaller than the embedded model and untrained: numbers, not pictures.

Text encoders and tokenizers are those of the embedded model, so shapes captions are words to it. 32 x 32 pixels are 16
image tokens of 32 numbers, as in the embedded model.
"""

from pathlib import Path
from typing import TypeVar

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig
from torch import Tensor
from torch.nn import functional as F

from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.shapes.pretrain import MAX_WORDS, build_pipeline
from solrl_lightning.shapes.world import IMAGE_SIZE

Policy = TypeVar("Policy", bound=Flux1)

PROMPTS = [
    "a red circle above a blue square",
    "a green triangle left of a cyan circle",
    "a blue square below a red square",
]
WIDTH, TEXT_WIDTH = 32, 64
TRANSFORMER = dict(
    patch_size=1,
    in_channels=32,
    num_layers=1,
    num_single_layers=1,
    num_attention_heads=2,
    attention_head_dim=WIDTH // 2,
    joint_attention_dim=TEXT_WIDTH,
    pooled_projection_dim=TEXT_WIDTH,
    axes_dims_rope=(4, 6, 6),
)


def build_nano(*, like_dev: bool = False, seed: int = 0) -> FluxPipeline:
    """The pipeline in float32. ``like_dev`` has the guidance embedding and the resolution shift of FLUX.1-dev."""
    with torch.random.fork_rng(devices=[]):
        pipeline = build_pipeline(seed)
        transformer = FluxTransformer2DModel(**TRANSFORMER, guidance_embeds=like_dev)
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(8, 8, 8),
            layers_per_block=1,
            latent_channels=8,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
            shift_factor=0.1159,
            scaling_factor=0.3611,
        )
    # The shift grows from 16 tokens on, so that it shows at this size.
    shift = dict(use_dynamic_shifting=True, base_image_seq_len=8, max_image_seq_len=64, base_shift=0.5, max_shift=1.15)
    scheduler = FlowMatchEulerDiscreteScheduler(**(shift if like_dev else {}))
    pipeline.register_modules(transformer=transformer, vae=vae, scheduler=scheduler)
    return pipeline


def save_nano(folder: Path, *, like_dev: bool = False, seed: int = 0) -> str:
    """Writes the pipeline as published, its transformer in bfloat16; returns the folder for ``model.pretrained``."""
    pipeline = build_nano(like_dev=like_dev, seed=seed)
    pipeline.transformer.to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    return str(folder)


def load_policy(
    folder: str, *, guidance: float = 1.0, decode_batch: int = 2, policy_class: type[Policy] = Flux1
) -> Policy:
    """The policy in a folder, or the embedded one if that is "tiny"."""
    return policy_class(
        folder, resolution=IMAGE_SIZE, max_sequence_length=MAX_WORDS, guidance=guidance, decode_batch=decode_batch
    )


def lora_config(rank: int = 4, alpha: int = 8) -> LoraConfig:
    """On the attention projections of every block, scaled by alpha / rank."""
    return LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights="gaussian"
    )


def random_state(state: dict[str, Tensor], seed: int, size: float = 0.3) -> dict[str, Tensor]:
    """An adapter state of the same names and shapes that has an effect (B is not 0)."""
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(value.shape, generator=generator) for name, value in state.items()}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, in units of the expected values' root mean square."""
    return float(F.mse_loss(found.double(), expected.double()).sqrt() / expected.double().square().mean().sqrt())
