"""The LinearFFN checkpoint of SANA 1.6B, with which Sol-RL was published, into diffusers' transformer.

The file is a state dict of NVlabs' own model class, SanaMSLinearFFN_1600M_P1_D20: the function of diffusers'
SanaTransformer2DModel with other names. Query, key and value are one matrix, so are key and value of the cross
attention, and the two 1x1 convolutions of the feed-forward network are linear layers. diffusers' script
convert_sana_to_diffusers.py has this mapping for the checkpoints in which they are convolutions.

Every key is accounted for: it goes into a parameter of the same shape, or it is one of ``UNUSED``.
"""

from collections.abc import Mapping

import torch
from diffusers import SanaTransformer2DModel
from torch import Tensor

from solrl_lightning.artifacts.files import check_state_dict, load_tensors
from solrl_lightning.errors import UserError

FILE = "SANA_LinearFFN.pth"  # in the hub repository yitongl/SANA_LinearFFN
UNUSED = {
    "y_embedder.y_embedding",  # embedding of no caption, for guidance without a classifier
    "pos_embed",  # table of positions, which this model does not use
    "logvar_linear.weight",  # weights of the training loss
    "logvar_linear.bias",
}

_OUTSIDE: dict[str, tuple[str, ...]] = {
    "x_embedder.proj": ("patch_embed.proj",),
    "t_embedder.mlp.0": ("time_embed.emb.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("time_embed.emb.timestep_embedder.linear_2",),
    "t_block.1": ("time_embed.linear",),
    "y_embedder.y_proj.fc1": ("caption_projection.linear_1",),
    "y_embedder.y_proj.fc2": ("caption_projection.linear_2",),
    "attention_y_norm": ("caption_norm",),
    "final_layer.linear": ("proj_out",),
}
_IN_A_BLOCK: dict[str, tuple[str, ...]] = {  # several names: the native tensor is their concatenation
    "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn.proj": ("attn1.to_out.0",),
    "cross_attn.q_linear": ("attn2.to_q",),
    "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v"),
    "cross_attn.proj": ("attn2.to_out.0",),
    "mlp.inverted_conv.linear": ("ff.conv_inverted",),
    "mlp.depth_conv.conv": ("ff.conv_depth",),
    "mlp.point_conv.linear": ("ff.conv_point",),
}


@torch.no_grad()
def load_linear_ffn(source: str, transformer: SanaTransformer2DModel) -> dict[str, Tensor]:
    """Copy the weights of a LinearFFN checkpoint, which are returned, into ``transformer``, in its dtype.

    ``source`` is a .pth file, or a hub id that holds SANA_LinearFFN.pth.
    """
    key, hint = "model.transformer_weights", f"Or give the path of a local {FILE}; yitongl/SANA_LinearFFN has it."
    weights = load_tensors(key, source, FILE, kind="SANA checkpoint", hint=hint)
    parameters = dict(transformer.named_parameters())
    names = _native_names(len(transformer.transformer_blocks), parameters)
    targets = {key: [parameters[name] for name in group] for key, group in names.items()}
    shapes = {native: torch.empty(_native_shape(native, group), device="meta") for native, group in targets.items()}
    used = {name: value for name, value in weights.items() if name not in UNUSED}
    fix = f"Give {FILE} of yitongl/SANA_LinearFFN with the SANA 1.6B pipeline, or model.transformer_weights=null."
    check_state_dict(key, source, shapes, used, "it has another size than model.pretrained", fix)
    if left := parameters.keys() - {name for group in names.values() for name in group}:
        raise UserError(f"{key}={source} is invalid: SANA 1.0 lacks {min(left)} of model.pretrained. {fix}")
    for native, group in targets.items():
        for target, part in zip(group, weights[native].chunk(len(group)), strict=True):
            target.copy_(part.view_as(target))
    return weights


def _native_names(blocks: int, parameters: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return, by native key, the diffusers parameters it holds. Layers have a bias where diffusers' have one."""
    layers = dict(_OUTSIDE)
    names = {"final_layer.scale_shift_table": ["scale_shift_table"]}
    for block in range(blocks):
        ours = f"transformer_blocks.{block}."
        for native, group in _IN_A_BLOCK.items():
            layers[f"blocks.{block}.{native}"] = tuple(ours + name for name in group)
        names[f"blocks.{block}.scale_shift_table"] = [f"{ours}scale_shift_table"]
    for native, layer in layers.items():
        for kind in ("weight", "bias"):
            if f"{layer[0]}.{kind}" in parameters:
                names[f"{native}.{kind}"] = [f"{name}.{kind}" for name in layer]
    return names


def _native_shape(key: str, group: list[Tensor]) -> tuple[int, ...]:
    rows = sum(len(parameter) for parameter in group)
    rest = group[0].shape[1:2] if ".linear." in key else group[0].shape[1:]  # a linear layer has no kernel dimensions
    return (rows, *rest)
