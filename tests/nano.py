"""Pipelines of the real classes in their real file layouts, very small and untrained: numbers, not pictures.

Words of shapes captions are words to their tokenizers. 32 x 32 pixels are 16 image tokens everywhere.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    AutoencoderTiny,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    ModelMixin,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig
from pretrain import MAX_WORDS, build_pipeline
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    UMT5Config,
    UMT5EncoderModel,
)

from solrl_lightning.cli.config import ConfigTree
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.policies.architectures import init_random_weights
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.shapes.world import COLOURS, IMAGE_SIZE, RELATIONS, SHAPES
from solrl_lightning.training.transformers import AdaptedTransformer

Model = TypeVar("Model", bound=PipelineAdapter)

PROMPTS = [
    "a red circle above a blue square",
    "a green triangle left of a cyan circle",
    "a blue square below a red square",
]
WIDTH, TEXT_WIDTH = 32, 64
_HEADS: dict[str, Any] = dict(num_attention_heads=2, attention_head_dim=WIDTH // 2)
_TEXT: dict[str, Any] = dict(joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=TEXT_WIDTH)
TRANSFORMER = dict(patch_size=1, in_channels=32, num_layers=1, num_single_layers=1, axes_dims_rope=(4, 6, 6))
TRANSFORMER |= _HEADS | _TEXT


def build_nano(*, like_dev: bool = False, seed: int = 0) -> FluxPipeline:
    """FLUX.1 in float32. ``like_dev`` has the guidance embedding and the resolution shift of FLUX.1-dev."""
    with torch.random.fork_rng(devices=[]):
        pipeline = build_pipeline(seed)
        transformer = FluxTransformer2DModel(**TRANSFORMER, guidance_embeds=like_dev)
        vae = _autoencoder(latent_channels=8, scaling_factor=0.3611, shift_factor=0.1159)
    # The shift grows from 16 tokens on, so that it shows at this size.
    shift = dict(use_dynamic_shifting=True, base_image_seq_len=8, max_image_seq_len=64, base_shift=0.5, max_shift=1.15)
    scheduler = FlowMatchEulerDiscreteScheduler(**(shift if like_dev else {}))
    pipeline.register_modules(transformer=transformer, vae=vae, scheduler=scheduler)
    return pipeline


def build_nano_sd3(*, seed: int = 0) -> StableDiffusion3Pipeline:
    """Stable Diffusion 3.5 in float32: normalised queries and keys, the last block without a text stream."""
    with torch.random.fork_rng(devices=[]):
        flux = build_pipeline(seed)  # for its words and its T5
        options = _HEADS | _TEXT | dict(in_channels=16, out_channels=16, patch_size=2, sample_size=8, num_layers=2)
        options |= dict(caption_projection_dim=WIDTH, pos_embed_max_size=12, qk_norm="rms_norm")
        transformer = SD3Transformer2DModel(**options)
        clips = [_clip(flux.tokenizer, width=TEXT_WIDTH // 2) for _ in range(2)]
        vae = _autoencoder(latent_channels=16, scaling_factor=1.5305, shift_factor=0.0609)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    texts = (clips[0], flux.tokenizer, clips[1], flux.tokenizer, flux.text_encoder_2, flux.tokenizer_2)
    return StableDiffusion3Pipeline(transformer, scheduler, vae, *texts)


def build_nano_sana(*, seed: int = 0) -> SanaPipeline:
    """SANA in float32: linear attention, convolutions in the feed-forward, an 8-fold DC-AE."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = _gemma_tokenizer()
        text = _text_options(tokenizer) | dict(intermediate_size=128, num_hidden_layers=2, sliding_window=64)
        text |= dict(head_dim=16, query_pre_attn_scalar=16, max_position_embeddings=512)
        text_encoder = Gemma2Model(Gemma2Config(**text))
        options = _HEADS | dict(in_channels=8, out_channels=8, num_layers=2, sample_size=4, caption_channels=TEXT_WIDTH)
        cross = dict(num_cross_attention_heads=2, cross_attention_head_dim=WIDTH // 2, cross_attention_dim=WIDTH)
        transformer = SanaTransformer2DModel(**options, **cross)
        sides: dict[str, Any] = {}
        for side in ("encoder", "decoder"):
            sides[f"{side}_block_types"] = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock")
            sides[f"{side}_block_out_channels"] = (8, 8, 16, 16)
            sides[f"{side}_layers_per_block"] = (1, 1, 1, 1)
            sides[f"{side}_qkv_multiscales"] = ((), (), (), (5,))
        options = dict(latent_channels=8, attention_head_dim=8, scaling_factor=0.41407)
        vae = AutoencoderDC(**options, **sides, upsample_block_type="interpolate", downsample_block_type="Conv")
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++", prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return SanaPipeline(tokenizer, text_encoder, vae, transformer, scheduler)


def build_nano_flux2(*, seed: int = 0) -> Flux2KleinPipeline:
    """FLUX.2 [klein] in float32: 27 layers of Qwen3, the last that the pipeline reads, and latents with statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = _qwen_tokenizer()
        text = dict(vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=27)
        text |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=WIDTH // 2)
        text_encoder = Qwen3ForCausalLM(Qwen3Config(**text, eos_token_id=tokenizer.eos_token_id))
        options = dict(in_channels=32, num_layers=1, num_single_layers=1, joint_attention_dim=3 * WIDTH)
        axes = dict(axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False)
        transformer = Flux2Transformer2DModel(**_HEADS, **options, **axes)
        vae = AutoencoderKLFlux2(**_KL, latent_channels=8)
        vae.bn.running_mean.uniform_(-0.5, 0.5)
        vae.bn.running_var.uniform_(0.5, 2.0)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return Flux2KleinPipeline(scheduler, vae, text_encoder, tokenizer, transformer)


def build_nano_qwen_image(*, seed: int = 0) -> QwenImagePipeline:
    """Qwen-Image in float32: an autoencoder of videos, and the scheduler's shift and terminal as published."""
    return QwenImagePipeline(**_qwen_image_parts(_qwen_tokenizer(), seed))


def build_nano_qwen_image_edit(*, seed: int = 0) -> QwenImageEditPipeline:
    """Qwen-Image-Edit in float32: the parts of Qwen-Image, with four tokens for an image of up to 56 x 56 pixels."""
    tokenizer = _qwen_tokenizer(_EDIT_WORDS, _EDIT_TOKENS)
    ids = map(tokenizer.convert_tokens_to_ids, _EDIT_TOKENS)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    numbers = dict(zip(names, ids, strict=True))
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor())
    return QwenImageEditPipeline(**_qwen_image_parts(tokenizer, seed, **numbers), processor=processor)


def _qwen_image_parts(tokenizer: Qwen2Tokenizer, seed: int, **tokens: int) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text = _text_options(tokenizer) | dict(intermediate_size=TEXT_WIDTH, num_hidden_layers=2)
        text |= dict(bos_token_id=None, pad_token_id=None)
        text |= dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]})
        vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=TEXT_WIDTH)
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
        text_encoder = Qwen2_5_VLForConditionalGeneration(config)
        options = dict(in_channels=64, out_channels=16, num_layers=1, axes_dims_rope=(4, 6, 6))
        transformer = QwenImageTransformer2DModel(**_HEADS, **options, joint_attention_dim=TEXT_WIDTH)
        blocks: dict[str, Any] = dict(dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[False, False])
        vae = AutoencoderKLQwenImage(base_dim=8, z_dim=16, **blocks)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=8, max_image_seq_len=64, max_shift=0.9, shift_terminal=0.02
    )
    parts = dict(scheduler=scheduler, vae=vae, text_encoder=text_encoder, transformer=transformer)
    return parts | {"tokenizer": tokenizer}


def build_nano_z_image(*, seed: int = 0) -> ZImagePipeline:
    """Z-Image in float32: the next to last of three layers of Qwen3, and learned tokens that pad text and image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = _qwen_tokenizer()
        text = _text_options(tokenizer) | dict(bos_token_id=None, head_dim=16)
        text_encoder = Qwen3Model(Qwen3Config(**text, intermediate_size=TEXT_WIDTH, num_hidden_layers=3))
        options: dict[str, Any] = dict(dim=WIDTH, n_heads=2, n_kv_heads=2, n_layers=1, n_refiner_layers=1)
        options |= dict(cap_feat_dim=TEXT_WIDTH, axes_dims=(4, 6, 6), axes_lens=(256, 16, 16))
        transformer = ZImageTransformer2DModel(**options)
        for token in (transformer.x_pad_token, transformer.cap_pad_token):
            torch.nn.init.normal_(token)
        vae = _autoencoder(latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159)
    return ZImagePipeline(FlowMatchEulerDiscreteScheduler(shift=6.0), vae, text_encoder, tokenizer, transformer)


def build_nano_wan(*, seed: int = 0) -> WanPipeline:
    """Wan 2.1 in float32: UMT5, a causal autoencoder of videos with statistics, and the published UniPC."""
    with torch.random.fork_rng(devices=[]):
        tokenizer = build_pipeline(seed).tokenizer_2  # FLUX.1's T5
        text = dict(vocab_size=len(tokenizer), d_model=TEXT_WIDTH, d_kv=16, d_ff=64, num_layers=1, num_heads=4)
        text_encoder = UMT5EncoderModel(UMT5Config(**text, dropout_rate=0.0, relative_attention_num_buckets=16))
        options = dict(text_dim=TEXT_WIDTH, freq_dim=WIDTH, ffn_dim=2 * WIDTH, num_layers=1, rope_max_seq_len=16)
        transformer = WanTransformer3DModel(**_HEADS, **options)
        blocks: dict[str, Any] = dict(dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[True, True])
        vae = AutoencoderKLWan(base_dim=8, z_dim=16, **blocks, scale_factor_spatial=4)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return WanPipeline(tokenizer, text_encoder, vae, scheduler, transformer)


BUILDERS: dict[str, Callable[..., DiffusionPipeline]] = {
    "flux1": build_nano,
    "sd3": build_nano_sd3,
    "sana": build_nano_sana,
    "flux2": build_nano_flux2,
    "qwen_image": build_nano_qwen_image,
    "z_image": build_nano_z_image,
    "wan": build_nano_wan,
}
EDITORS = {"qwen_image_edit": build_nano_qwen_image_edit}  # whose prompts have an image


class LevelsOf(FlowMatchEulerDiscreteScheduler):
    """At the noise levels of a model, for a pipeline whose call takes none."""

    def __init__(self, model: PipelineAdapter) -> None:
        super().__init__()
        self.model = model

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        super().set_timesteps(sigmas=self.model.sigmas(num_inference_steps)[:-1].tolist(), device=device)


DTYPES = {"transformer": "bfloat16", "default": "float32"}
NANO: dict[str, Any] = dict(resolution=IMAGE_SIZE, max_sequence_length=MAX_WORDS, decode_batch=2, dtypes=DTYPES)
NANO |= dict(embeddings=None, gradient_checkpointing=False, variant=None)


def save_nano(folder: Path, architecture: str = "flux1", *, seed: int = 0, **options: Any) -> str:
    """Writes the pipeline as published, its transformer in bfloat16; returns the folder for ``model.pretrained``."""
    pipeline = (BUILDERS | EDITORS)[architecture](seed=seed, **options)
    pipeline.transformer.to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    return str(folder)


def save_preview_decoder(folder: Path, *, channels: int, compression: int, seed: int = 0) -> str:
    """Writes an AutoencoderTiny of such latents; returns the folder for ``model.preview_decoder``.

    Its scale and shift differ from the published 1 and 0, so that they show.
    """
    blocks = compression.bit_length()
    with torch.random.fork_rng(devices=[]):
        sides = {f"{side}_block_out_channels": (8,) * blocks for side in ("encoder", "decoder")}
        counts = {f"num_{side}_blocks": (1,) * blocks for side in ("encoder", "decoder")}
        scale = dict(scaling_factor=0.4, shift_factor=0.3)
        decoder = AutoencoderTiny(latent_channels=channels, **sides, **counts, **scale)
    init_random_weights(decoder, seed)
    decoder.save_pretrained(folder)
    return str(folder)


def load_model(
    folder: str, *, guidance: float = 1.0, decode_batch: int = 2, model_class: type[Model] = Flux1, **options: Any
) -> Model:
    """The FLUX.1 model in a folder, or the embedded one if that is "tiny"."""
    options = dict(max_sequence_length=MAX_WORDS, dtypes=DTYPES) | options
    return model_class(folder, IMAGE_SIZE, guidance=guidance, decode_batch=decode_batch, **options)


def load_nano(architecture: str, folder: str, **options: Any) -> PipelineAdapter:
    """The model of any architecture in a folder that ``save_nano`` wrote, by the options of ``conf/model``."""
    options = NANO | dict(pretrained=folder) | options
    if architecture == "wan":
        options = dict(num_frames=5) | options
    return model_class(architecture)(**model_options(architecture) | options)


def model_class(architecture: str) -> type[PipelineAdapter]:
    return get_class(_node(architecture)._target_)


def model_options(architecture: str) -> dict[str, Any]:
    options: dict[str, Any] = OmegaConf.to_container(_node(architecture), resolve=True)  # type: ignore[assignment]
    return {key: value for key, value in options.items() if key != "_target_"}


@cache
def _node(architecture: str) -> DictConfig:
    with ConfigTree() as tree:
        return tree.compose([f"model={architecture}"]).model.policy


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


def lora_config(rank: int = 4, alpha: int = 8, targets: Sequence[str] = ATTENTION) -> LoraConfig:
    """On the attention projections of every block, scaled by alpha / rank."""
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights="gaussian")


def adapters() -> Callable[[ModelMixin], AdaptedTransformer]:
    """What adds `lora_config` to a transformer."""
    return partial(AdaptedTransformer, config=lora_config(), seed=0)


def prompts_of(texts: Sequence[str]) -> list[Prompt]:
    """Prompts without metadata."""
    return [Prompt(text) for text in texts]


def random_state(state: dict[str, Tensor], seed: int, size: float = 0.3) -> dict[str, Tensor]:
    """An adapter state of the same names and shapes that has an effect (B is not 0)."""
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(value.shape, generator=generator) for name, value in state.items()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, in units of the expected values' root mean square."""
    return float(F.mse_loss(actual.double(), expected.double()).sqrt() / expected.double().square().mean().sqrt())


_KL: dict[str, Any] = dict(layers_per_block=1, norm_num_groups=4, mid_block_add_attention=False)
_KL |= dict(down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3)
_KL |= dict(block_out_channels=(8, 8, 8))


def _autoencoder(**latents: Any) -> AutoencoderKL:
    """4-fold, with the published models' scale and shift of the latents."""
    return AutoencoderKL(**_KL, use_quant_conv=False, use_post_quant_conv=False, **latents)


def _clip(tokenizer: Any, width: int) -> CLIPTextModelWithProjection:
    sizes = dict(hidden_size=width, intermediate_size=2 * width, projection_dim=width, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, max_position_embeddings=MAX_WORDS + 1)
    return CLIPTextModelWithProjection(CLIPTextConfig(vocab_size=len(tokenizer), **sizes, **_special(tokenizer)))


def _text_options(tokenizer: Any) -> dict[str, Any]:
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    return heads | _special(tokenizer) | dict(vocab_size=len(tokenizer), hidden_size=TEXT_WIDTH)


def _special(tokenizer: Any) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _gemma_tokenizer() -> GemmaTokenizer:
    """Letters and the mark of a space; the words are spelled."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    vocabulary = {token: number for number, token in enumerate([*special, "▁", *letters])}
    return GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=MAX_WORDS, add_bos_token=True)


_EDIT_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_EDIT_WORDS = (
    "key features of input ( ), then explain how user 's instruction should alter or modify Generate new that meets "
    "requirements while maintaining consistency with original where appropriate objects"
).split()


def _qwen_tokenizer(words: Sequence[str] = (), others: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Words of the captions and of the pipelines' templates; other text is spelled in bytes.

    As with the published vocabulary, the template of Qwen-Image has 34 tokens before the prompt, that of
    Qwen-Image-Edit 64 before the image.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: number for number, token in enumerate([*special, *sorted(ByteLevel.alphabet())])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=1024)
    template = "system user assistant Describe the image by detailing color shape size texture quantity text"
    template += " spatial relationships of objects and background"
    captions = ("a", "an", *COLOURS, *SHAPES, *" ".join(RELATIONS).split())
    words = dict.fromkeys([*template.split(), *captions, *words])
    tokenizer.add_tokens([*special[1:], *others, *(form for word in words for form in (f" {word}", word))])
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer
