"""What the models are built of: diffusers and transformers classes and the arguments of their constructors.

FLUX.1-dev, Stable Diffusion 3.5 Large and SANA 1.6B are shipped as facts, without weights or tokenizers, so that plans
and timings at their real size need no download. Any other model is read from the config files of its local folder.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers

_LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
_INDEX = "model_index.json"


class Component(NamedTuple):
    """One part of a pipeline."""

    library: str
    """diffusers or transformers."""
    cls: str
    config: Mapping[str, Any]
    """Constructor arguments that differ from the class's defaults, or a whole config.json."""


class Architecture(NamedTuple):
    """A pipeline without weights. Tokenizers are left out."""

    name: str
    pipeline: str
    """Class of diffusers."""
    components: Mapping[str, Component]


def find(pretrained: str, pipeline_class: type[diffusers.DiffusionPipeline]) -> Architecture:
    """That of the local pipeline folder ``pretrained``; for a hub id, which is not asked, the shipped one."""
    folder = Path(pretrained).expanduser()
    if (folder / _INDEX).is_file():
        return read(folder)
    return next(architecture for architecture in SHIPPED if architecture.pipeline == pipeline_class.__name__)


def read(folder: Path) -> Architecture:
    """The architecture that a diffusers pipeline folder describes in its config files."""
    index = json.loads((folder / _INDEX).read_text())
    components = {}
    for name, entry in index.items():
        files = (folder / name / "config.json", folder / name / "scheduler_config.json")
        file = next((file for file in files if file.is_file()), None)
        if file is not None and not name.startswith("tokenizer"):
            library, cls = entry
            components[name] = Component(library, cls, json.loads(file.read_text()))
    return Architecture(str(folder), index["_class_name"], components)


def build(component: Component, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Any:
    """The component with the initial weights of its class, made on ``device`` in ``dtype`` from the start.

    On the device ``meta`` it has shapes and no storage.
    """
    cls = getattr(_LIBRARIES[component.library], component.cls)
    with torch.device(device), _default_dtype(dtype):
        if component.library == "transformers":
            return cls(cls.config_class(**component.config))
        return cls.from_config(dict(component.config))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_T5_XXL = Component(
    "transformers",
    "T5EncoderModel",
    {
        "vocab_size": 32128,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
)
_CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "projection_dim": 768,
    "hidden_act": "quick_gelu",
}
_CLIP_G = _CLIP_L | {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}


def _kl_autoencoder(scaling_factor: float, shift_factor: float) -> Component:
    """The autoencoder of 16 channels at an eighth of the resolution."""
    config = {
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": 16,
        "sample_size": 1024,
        "scaling_factor": scaling_factor,
        "shift_factor": shift_factor,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    return Component("diffusers", "AutoencoderKL", config)


_FLUX1 = Architecture(
    "FLUX.1-dev",
    "FluxPipeline",
    {
        "transformer": Component(
            "diffusers",
            "FluxTransformer2DModel",
            {
                "patch_size": 1,
                "in_channels": 64,
                "num_layers": 19,
                "num_single_layers": 38,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": 4096,
                "pooled_projection_dim": 768,
                "guidance_embeds": True,
                "axes_dims_rope": [16, 56, 56],
            },
        ),
        "vae": _kl_autoencoder(0.3611, 0.1159),
        "text_encoder": Component("transformers", "CLIPTextModel", _CLIP_L),
        "text_encoder_2": _T5_XXL,
        "scheduler": Component(
            "diffusers",
            "FlowMatchEulerDiscreteScheduler",
            {
                "shift": 3.0,
                "use_dynamic_shifting": True,
                "base_shift": 0.5,
                "max_shift": 1.15,
                "base_image_seq_len": 256,
                "max_image_seq_len": 4096,
            },
        ),
    },
)
_SD3 = Architecture(
    "stable-diffusion-3.5-large",
    "StableDiffusion3Pipeline",
    {
        "transformer": Component(
            "diffusers",
            "SD3Transformer2DModel",
            {
                "sample_size": 128,
                "patch_size": 2,
                "in_channels": 16,
                "num_layers": 38,
                "attention_head_dim": 64,
                "num_attention_heads": 38,
                "joint_attention_dim": 4096,
                "caption_projection_dim": 2432,
                "pooled_projection_dim": 2048,
                "out_channels": 16,
                "pos_embed_max_size": 192,
                "dual_attention_layers": [],
                "qk_norm": "rms_norm",
            },
        ),
        "vae": _kl_autoencoder(1.5305, 0.0609),
        "text_encoder": Component("transformers", "CLIPTextModelWithProjection", _CLIP_L),
        "text_encoder_2": Component("transformers", "CLIPTextModelWithProjection", _CLIP_G),
        "text_encoder_3": _T5_XXL,
        "scheduler": Component("diffusers", "FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    },
)
_SANA = Architecture(
    "Sana_1600M_1024px",
    "SanaPipeline",
    {
        "transformer": Component(
            "diffusers",
            "SanaTransformer2DModel",
            {
                "sample_size": 32,
                "patch_size": 1,
                "in_channels": 32,
                "out_channels": 32,
                "num_layers": 20,
                "num_attention_heads": 70,
                "attention_head_dim": 32,
                "num_cross_attention_heads": 20,
                "cross_attention_head_dim": 112,
                "cross_attention_dim": 2240,
                "caption_channels": 2304,
                "mlp_ratio": 2.5,
            },
        ),
        "vae": Component(
            "diffusers",
            "AutoencoderDC",
            {
                "latent_channels": 32,
                "encoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
                "decoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
                "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
                "decoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
                "encoder_layers_per_block": [2, 2, 2, 3, 3, 3],
                "decoder_layers_per_block": [3, 3, 3, 3, 3, 3],
                "encoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
                "decoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
                "upsample_block_type": "interpolate",
                "downsample_block_type": "Conv",
                "scaling_factor": 0.41407,
            },
        ),
        "text_encoder": Component(
            "transformers",
            "Gemma2Model",
            {
                "vocab_size": 256000,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
            },
        ),
        "scheduler": Component(
            "diffusers",
            "DPMSolverMultistepScheduler",
            {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
        ),
    },
)
SHIPPED = (_FLUX1, _SD3, _SANA)
