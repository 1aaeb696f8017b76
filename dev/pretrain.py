"""Build and train the embedded model: ``python dev/pretrain.py FOLDER [--seed 0] [--device cpu]``.

The model is a ``FluxPipeline`` of the real classes, small enough for two CPU cores.

1. The autoencoder is trained to reconstruct renderings (L1 loss and 1e-4 KL). It encodes a patch of 8 x 8 pixels as one
   token of 32 numbers. A token must be narrower than the transformer's width of 128, or the transformer cannot predict
   full-rank noise.
2. The transformer and both text encoders are trained together by flow matching: x_t = (1 - sigma) x0 + sigma eps,
   target eps - x0, sigma from a logit-normal distribution (Esser et al. 2024, arXiv 2403.03206, eq. 19).
3. Both are trained further on captions with wrong words: a share of the relations is reversed, a share of the shapes is
   random. The model still knows the answer and no longer always gives it, as a real base model.
4. The decoder of a tiny autoencoder is trained to reproduce the images of the autoencoder (L1 loss), also from noisy
   latents, because few solver steps leave noise. Its encoder is not trained.

Training uses training captions only. The model is a function of the seed. Renderings come from a CPU generator, so a
GPU run has the same scenes.
"""

import argparse
import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from solrl_lightning.artifacts.files import written_whole
from solrl_lightning.policies.preview import EMBEDDED
from solrl_lightning.shapes.world import (
    BACKGROUND,
    COLOURS,
    IMAGE_SIZE,
    MAX_RADIUS,
    MIN_RADIUS,
    RELATIONS,
    SHAPES,
    Scene,
    coverage,
    parse_caption,
    train_captions,
)

MAX_WORDS = 10  # the longest caption, "a red circle left of a blue square", has nine tokens with the end token
WIDTH = 128
_TEXT_WIDTH = 64
_PREVIEW_WIDTH = 16
DISTRACTOR_RADIUS = (3.0, 4.0)
_LARGEST_NOISE = 0.5  # standard deviation, on latents of unit variance


class Recipe(NamedTuple):
    """Steps, batch sizes and peak learning rates of the four trainings."""

    seed: int = 0
    vae_steps: int = 1200
    vae_batch: int = 32
    vae_lr: float = 2e-3
    flow_steps: int = 6000
    flow_cycle: int = 12000
    """Steps of the one-cycle schedule of ``flow_lr``, which ends before the rate falls to 0."""
    flow_batch: int = 64
    flow_lr: float = 1e-3
    doubt_steps: int = 1400
    doubt_lr: float = 5e-4
    reversed_relations: float = 0.35
    """Share of the captions whose relation is reversed in step 3."""
    random_shapes: float = 0.25
    """Share of the captions' shape words that are drawn at random in step 3."""
    distractors: float = 0.4
    """Share of the flow's images with a third object that is not in the caption, a flaw that post-training removes."""
    preview_steps: int = 2500
    preview_batch: int = 32
    preview_lr: float = 3e-3


def build_pipeline(seed: int) -> FluxPipeline:
    """Return the untrained pipeline."""
    torch.manual_seed(seed)
    words = sorted({"a", "an", *COLOURS, *SHAPES, *" ".join(RELATIONS).split()})
    t5_vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -1.0) for word in words)]
    t5_tokenizer = T5TokenizerFast(vocab=t5_vocabulary, extra_ids=0, model_max_length=MAX_WORDS)
    clip_tokenizer = _clip_tokenizer(words)
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(t5_tokenizer), d_model=_TEXT_WIDTH, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            dropout_rate=0.0, feed_forward_proj="gated-gelu", relative_attention_num_buckets=16,
            relative_attention_max_distance=32, use_cache=False,
        )
    )  # fmt: skip
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_tokenizer), hidden_size=_TEXT_WIDTH, intermediate_size=128, projection_dim=_TEXT_WIDTH,
            num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=MAX_WORDS + 1,
            bos_token_id=clip_tokenizer.bos_token_id, eos_token_id=clip_tokenizer.eos_token_id,
            pad_token_id=clip_tokenizer.pad_token_id,
        )
    )  # fmt: skip
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64), layers_per_block=1, latent_channels=8, norm_num_groups=8,
        sample_size=IMAGE_SIZE, use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False,
        shift_factor=0.0, scaling_factor=1.0,
    )  # fmt: skip
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=32, num_layers=1, num_single_layers=3, num_attention_heads=4,
        attention_head_dim=WIDTH // 4, joint_attention_dim=_TEXT_WIDTH, pooled_projection_dim=_TEXT_WIDTH,
        guidance_embeds=False, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False)
    return FluxPipeline(scheduler, vae, clip, clip_tokenizer, t5, t5_tokenizer, transformer)


def _clip_tokenizer(words: list[str]) -> CLIPTokenizer:
    """Make a byte-pair tokenizer with one token per word of the grammar; it splits other text into letters."""
    special = ["<|startoftext|>", "<|endoftext|>"]
    letters = [chr(c) for c in range(ord("!"), ord("~") + 1)]
    tokenizer = Tokenizer(BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    # BpeTrainer numbers letters that are not listed in the order of a hash map, which varies.
    alphabet = [*special, *letters, *(f"{letter}</w>" for letter in letters)]
    trainer = BpeTrainer(special_tokens=alphabet, end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator([*words, *letters], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return CLIPTokenizer(vocab=model["vocab"], merges=merges, model_max_length=MAX_WORDS + 1)


def train_autoencoder(vae: AutoencoderKL, recipe: Recipe, device: torch.device) -> None:
    """Train ``vae`` in place, and set its shift and scaling factors to the latents' mean and 1/std."""
    vae.to(device).train()
    generator = torch.Generator().manual_seed(recipe.seed + 1)

    def loss() -> Tensor:
        images, _captions = _batch(recipe.vae_batch, generator, device)
        posterior = vae.encode(images).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator).to(device)
        reconstruction = vae.decode(posterior.mean + posterior.std * noise).sample
        return F.l1_loss(reconstruction, images) + 1e-4 * posterior.kl().mean() / posterior.mean[0].numel()

    _minimise(loss, vae, recipe.vae_steps, recipe.vae_lr, "autoencoder")
    vae.eval().requires_grad_(False)
    with torch.no_grad():
        latents = vae.encode(_batch(512, generator, device)[0]).latent_dist.mode()
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


def train_flow(
    pipeline: FluxPipeline,
    recipe: Recipe,
    device: torch.device,
    *,
    steps: int,
    cycle: int,
    lr: float,
    misspeak: Callable[[str], str] = str,
) -> None:
    """Train the transformer and the text encoders of ``pipeline`` in place. The result is an average over the steps.

    ``misspeak`` maps the caption of a rendering to the caption that the model is given.
    """
    trained = nn.ModuleList([pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2])
    trained.to(device).train().requires_grad_(True)
    averaged = copy.deepcopy(trained)
    generator = torch.Generator().manual_seed(recipe.seed + 2)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, cycle, pct_start=0.05)
    progress = tqdm(range(steps), desc="flow matching", mininterval=2)
    for _ in progress:
        images, captions = _batch(recipe.flow_batch, generator, device, recipe.distractors)
        captions = [misspeak(caption) for caption in captions]
        x0 = _scaled_latents(pipeline.vae, images)
        eps = torch.randn(x0.shape, generator=generator).to(device)
        sigma = torch.sigmoid(torch.randn(len(captions), generator=generator)).to(device)
        x_t = torch.lerp(x0, eps, sigma[:, None, None, None])
        prompt_embeds, pooled, text_ids = pipeline.encode_prompt(captions, device=device, max_sequence_length=MAX_WORDS)
        velocity = pipeline.transformer(
            hidden_states=_pack(x_t), timestep=sigma, encoder_hidden_states=prompt_embeds, pooled_projections=pooled,
            txt_ids=text_ids, img_ids=_image_ids(x_t, device), return_dict=False,
        )[0]  # fmt: skip
        loss = F.mse_loss(velocity, _pack(eps - x0))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(averaged.parameters()), list(trained.parameters()), 0.005)
        progress.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    trained.load_state_dict(averaged.state_dict())
    trained.eval().requires_grad_(False)


def misspeaker(recipe: Recipe) -> Callable[[str], str]:
    """Return a function that reverses the relation and replaces the shapes of captions, in the recipe's shares."""
    reversed_ = {(-x, -y): name for name, (x, y) in RELATIONS.items()}
    draw = random.Random(recipe.seed + 4)

    def misspeak(caption: str) -> str:
        scene = parse_caption(caption)
        reverse = draw.random() < recipe.reversed_relations
        relation = reversed_[RELATIONS[scene.relation]] if reverse else scene.relation
        first, second = (
            (colour, draw.choice(SHAPES) if draw.random() < recipe.random_shapes else shape)
            for colour, shape in (scene.first, scene.second)
        )
        return Scene(first, relation, second).caption()

    return misspeak


def train_preview_decoder(vae: AutoencoderKL, recipe: Recipe, device: torch.device) -> AutoencoderTiny:
    """Make a tiny autoencoder that decodes the scaled latents of ``vae`` many times faster."""
    torch.manual_seed(recipe.seed + 3)
    tiny = AutoencoderTiny(
        latent_channels=vae.config.latent_channels,
        encoder_block_out_channels=(_PREVIEW_WIDTH,) * 3, num_encoder_blocks=(0, 0, 0),
        decoder_block_out_channels=(_PREVIEW_WIDTH,) * 3, num_decoder_blocks=(3, 2, 1),
    ).to(device)  # fmt: skip
    generator = torch.Generator().manual_seed(recipe.seed + 3)

    def loss() -> Tensor:
        images, _captions = _batch(recipe.preview_batch, generator, device, recipe.distractors)
        with torch.no_grad():
            x0 = _scaled_latents(vae, images)
            level = _LARGEST_NOISE * torch.rand(len(x0), 1, 1, 1, generator=generator)
            x = x0 + (level * torch.randn(x0.shape, generator=generator)).to(device)
            target = vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor).sample.clamp(-1, 1)
        return F.l1_loss(tiny.decode(x).sample, target)

    _minimise(loss, tiny.decoder, recipe.preview_steps, recipe.preview_lr, "preview decoder")
    return tiny.eval().requires_grad_(False)


def pretrain_pipeline(folder: Path, recipe: Recipe, device: torch.device) -> FluxPipeline:
    """Run the recipe, and save the pipeline with its transformer in bfloat16 and all other components in float32.

    The preview decoder is no component of the pipeline; it is saved in the subfolder ``EMBEDDED``.
    """
    pipeline = build_pipeline(recipe.seed)
    pipeline.set_progress_bar_config(disable=True)
    train_autoencoder(pipeline.vae, recipe, device)
    train_flow(pipeline, recipe, device, steps=recipe.flow_steps, cycle=recipe.flow_cycle, lr=recipe.flow_lr)
    train_flow(
        pipeline, recipe, device, steps=recipe.doubt_steps, cycle=recipe.doubt_steps, lr=recipe.doubt_lr,
        misspeak=misspeaker(recipe),
    )  # fmt: skip
    pipeline.transformer.to(torch.bfloat16)
    with written_whole(folder) as part:
        pipeline.save_pretrained(part, safe_serialization=True)
    decoder = train_preview_decoder(pipeline.vae, recipe, device)
    with written_whole(folder / EMBEDDED) as part:
        decoder.save_pretrained(part)
    return pipeline


def _minimise(loss: Callable[[], Tensor], module: nn.Module, steps: int, lr: float, name: str) -> None:
    """Take ``steps`` steps of AdamW on ``loss``; ``lr`` is the peak of a one-cycle schedule."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    progress = tqdm(range(steps), desc=name, mininterval=2)
    for _ in progress:
        value = loss()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{value.item():.4f}", refresh=False)


def _batch(
    size: int, generator: torch.Generator, device: torch.device, distractors: float = 0.0
) -> tuple[Tensor, list[str]]:
    """Return renderings [B, 3, 32, 32] in [-1, 1] of random training captions, and the captions."""
    pool = train_captions()
    captions = [pool[i] for i in torch.randint(len(pool), (size,), generator=generator).tolist()]
    images = render([parse_caption(caption) for caption in captions], generator, distractors)
    return images.to(device) * 2 - 1, captions


@torch.no_grad()
def _scaled_latents(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Latents [B, 8, 8, 8] with mean 0 and variance 1, the scale of the transformer's input."""
    return (vae.encode(images).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor


def _pack(latents: Tensor) -> Tensor:
    return FluxPipeline._pack_latents(latents, *latents.shape)


def _image_ids(latents: Tensor, device: torch.device) -> Tensor:
    height, width = latents.shape[-2] // 2, latents.shape[-1] // 2
    return FluxPipeline._prepare_latent_image_ids(1, height, width, device, torch.float32)


# Rendering


def render(scenes: list[Scene], generator: torch.Generator, distractors: float = 0.0) -> Tensor:
    """Images [B, 3, 32, 32] in [0, 1] of the scenes, with sizes and positions drawn from ``generator``.

    A share ``distractors`` of the images has a third, smaller object that the caption does not mention.
    """
    batch = len(scenes)
    radius = MIN_RADIUS + (MAX_RADIUS - MIN_RADIUS) * torch.rand(batch, 2, generator=generator)
    apart = torch.rand(batch, 2, generator=generator) * 2.5 + 7.0  # distance of each object from the middle
    aside = (torch.rand(batch, 2, generator=generator) - 0.5) * 12.0  # across the relation's axis
    direction = torch.tensor([RELATIONS[scene.relation] for scene in scenes], dtype=torch.float32)
    across = direction.flip(1).abs()
    signs = torch.tensor([1.0, -1.0])[:, None]  # the second object lies opposite
    centre = IMAGE_SIZE / 2 + signs * apart[..., None] * direction[:, None] + aside[..., None] * across[:, None]
    shapes = torch.tensor([[SHAPES.index(scene.first[1]), SHAPES.index(scene.second[1])] for scene in scenes])
    colours = torch.tensor([[COLOURS[scene.first[0]], COLOURS[scene.second[0]]] for scene in scenes])
    image = torch.tensor(BACKGROUND)[None, :, None, None].expand(batch, 3, IMAGE_SIZE, IMAGE_SIZE)
    for i in range(2):
        mask = coverage(shapes[:, i], centre[:, i], radius[:, i])[:, None]
        image = image * (1 - mask) + colours[:, i, :, None, None] * mask
    return _add_distractors(image, scenes, centre, distractors, generator) if distractors else image


def _add_distractors(
    image: Tensor, scenes: list[Scene], centre: Tensor, share: float, generator: torch.Generator
) -> Tensor:
    """Draw third objects in another colour, each at the most distant of 8 random places."""
    batch = len(scenes)
    places = 4 + (IMAGE_SIZE - 8) * torch.rand(batch, 8, 2, generator=generator)
    room = torch.cdist(places, centre).amin(2)  # [B, 8]
    place = places[torch.arange(batch), room.argmax(1)]
    free = [[rgb for name, rgb in COLOURS.items() if name not in (s.first[0], s.second[0])] for s in scenes]
    pick = torch.randint(len(COLOURS) - 2, (batch,), generator=generator)
    colour = torch.tensor(free)[torch.arange(batch), pick]
    shape = torch.randint(len(SHAPES), (batch,), generator=generator)
    low, high = DISTRACTOR_RADIUS
    mask = coverage(shape, place, low + (high - low) * torch.rand(batch, generator=generator))[:, None]
    mask = mask * (torch.rand(batch, generator=generator) < share)[:, None, None, None]
    return image * (1 - mask) + colour[:, :, None, None] * mask


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the pipeline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    pretrain_pipeline(options.folder, Recipe(seed=options.seed), torch.device(options.device))
    print(f"Train it with model.pretrained={options.folder}")
