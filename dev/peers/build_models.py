"""Write the pipelines and prompts of the benchmark: ``python build_models.py FOLDER``.

``tiny-flux`` and ``tiny-sd3`` are pipelines of the real diffusers classes with random float32 weights from a fixed
seed. ``data`` has 64 training prompts and 8 others.
"""

import itertools
import json
import string
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

COLOURS = ["red", "green", "blue", "yellow", "purple", "orange", "white", "black"]
THINGS = ["cat", "dog", "house", "tree", "car", "boat", "bird", "lamp"]
CHARACTERS = string.ascii_lowercase + string.digits
HEADS: dict[str, Any] = dict(num_attention_heads=4, attention_head_dim=32)


def clip(model: Any) -> tuple[Any, CLIPTokenizer]:
    """Make a CLIP text model of two layers and width 32, and a tokenizer whose tokens are characters."""
    tokens = [*CHARACTERS, *(character + "</w>" for character in CHARACTERS), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocabulary.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
        merges.write_text("#version: 0.2\n")
        tokenizer = CLIPTokenizer(str(vocabulary), str(merges), model_max_length=77)
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    size: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    size |= dict(vocab_size=len(tokens), projection_dim=32, bos_token_id=start, eos_token_id=end, pad_token_id=end)
    return model(CLIPTextConfig(max_position_embeddings=77, **size)), tokenizer


def t5(width: int) -> tuple[T5EncoderModel, T5TokenizerFast]:
    """Make an encoder of two layers, and a tokenizer whose tokens are characters."""
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *CHARACTERS, *("\u2581" + character for character in CHARACTERS)]
    tokenizer = T5TokenizerFast(vocab=[(piece, -3.0) for piece in pieces], extra_ids=0, model_max_length=512)
    size: dict[str, Any] = dict(d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=2, num_heads=4)
    size |= dict(vocab_size=len(pieces), feed_forward_proj="gated-gelu", decoder_start_token_id=0)
    return T5EncoderModel(T5Config(**size)), tokenizer


def autoencoder(scaling_factor: float, shift_factor: float) -> AutoencoderKL:
    blocks: dict[str, Any] = dict(block_out_channels=(16, 16, 32, 32), norm_num_groups=8)
    blocks |= dict(down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4)
    blocks |= dict(use_quant_conv=False, use_post_quant_conv=False)
    return AutoencoderKL(latent_channels=16, scaling_factor=scaling_factor, shift_factor=shift_factor, **blocks)


def flux() -> FluxPipeline:
    """Two double and four single blocks of width 128, with the guidance embedding."""
    size: dict[str, Any] = dict(in_channels=64, num_layers=2, num_single_layers=4, axes_dims_rope=(8, 12, 12))
    size |= dict(joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    vae, (text, tokenizer), (text_2, tokenizer_2) = autoencoder(0.3611, 0.1159), clip(CLIPTextModel), t5(32)
    transformer = FluxTransformer2DModel(**size, **HEADS)
    return FluxPipeline(scheduler, vae, text, tokenizer, text_2, tokenizer_2, transformer)


def sd3() -> StableDiffusion3Pipeline:
    """Six blocks of width 128 with normalised queries and keys."""
    size: dict[str, Any] = dict(sample_size=32, num_layers=6, pos_embed_max_size=64, qk_norm="rms_norm")
    size |= dict(joint_attention_dim=64, caption_projection_dim=128, pooled_projection_dim=64)
    transformer = SD3Transformer2DModel(**size, **HEADS)
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.1)
    texts = [*clip(CLIPTextModelWithProjection), *clip(CLIPTextModelWithProjection), *t5(64)]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return StableDiffusion3Pipeline(transformer, scheduler, autoencoder(1.5305, 0.0609), *texts)


if __name__ == "__main__":
    home = Path(sys.argv[1])
    (home / "data").mkdir(parents=True, exist_ok=True)
    train = [f"a {colour} {thing}" for colour, thing in itertools.product(COLOURS, THINGS)]
    test = [f"a photo of a {colour} {thing}" for colour, thing in zip(COLOURS, THINGS, strict=True)]
    for name, prompts in (("train", train), ("test", test)):
        (home / "data" / f"{name}.txt").write_text("\n".join(prompts) + "\n")
    for build in (flux, sd3):
        torch.manual_seed(0)
        pipeline = build()
        pipeline.save_pretrained(home / f"tiny-{build.__name__}")
        count = sum(parameter.numel() for parameter in pipeline.transformer.parameters())
        print(f"tiny-{build.__name__}: {count} parameters in the transformer")
