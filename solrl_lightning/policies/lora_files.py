"""LoRA files of diffusers, peft and other trainers, read as W + B A: the scale of every layer is multiplied into B.

`read_lora_file` reads one to train on; `fuse_lora` makes one a part of the base model, as that which distils Qwen-Image
to few steps.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch import Tensor, nn

from solrl_lightning.artifacts.complete import check_header, lora_file, reading
from solrl_lightning.artifacts.hub import fetch
from solrl_lightning.errors import UserError
from solrl_lightning.names import LORA_FILES, PEFT_CONFIG
from solrl_lightning.policies.lora import layer_shapes

log = logging.getLogger(__name__)

_PEFT = "base_model.model."
_PREFIXES = ("transformer.", _PEFT, "diffusion_model.", "")
_WEIGHT = re.compile(r"(?P<layer>.+?)\.lora[._](?P<factor>A|B|down|up)(\.default)?\.weight")
_FACTORS = {"A": "A", "down": "A", "B": "B", "up": "B"}
_OF_TEXT_ENCODERS = re.compile(r"text_encoder|lora_te|clip_[lg]\.|t5")
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")  # in any case; they leave the base weights as they are
_COMPILED = "_orig_mod."  # of a transformer that torch.compile has wrapped
_FIX = "Name a LoRA of this model."
_RENAME = "Name one in the names of diffusers, or of peft."


def read_lora_file(
    path: Path, transformer: nn.Module, pipeline_class: type[DiffusionPipeline], named: str
) -> dict[str, Tensor]:
    """Return float32 ``<layer>.lora_A.weight`` [r, in] and ``<layer>.lora_B.weight`` [out, r], whose product is added.

    Layers have the names of ``transformer``, their ranks may differ. The factor alpha / r, or alpha / sqrt(r) with
    rsLoRA, is in B. Alpha is the entry <layer>.alpha of the file, or else the alpha of the peft configuration in its
    metadata, where diffusers writes it, or beside it, where peft does; without any it is r.
    ``pipeline_class.lora_state_dict`` converts the names of other trainers. The part of text encoders is left out.

    Raises:
        UserError: the file cannot be read, is no LoRA of this transformer, or has more than A, B and alpha. It begins
            with ``named``.
    """
    file = lora_file(path) or path
    with reading(f"{named}: {file}"):
        check_header(file, named)
        with safe_open(file, framework="pt") as opened:
            tensors = {name.replace(_COMPILED, ""): opened.get_tensor(name) for name in opened.keys()}
            settings = (opened.metadata() or {}).get("lora_adapter_metadata", "{}")
    beside, of_peft = file.with_name(PEFT_CONFIG), bool(tensors) and all(name.startswith(_PEFT) for name in tensors)
    is_bare = file.name == LORA_FILES[1] and settings == "{}"  # as of tensors that a script saved under peft's name
    if beside.is_file() and (of_peft or is_bare):
        settings = beside.read_text(encoding="utf-8", errors="replace")
    config = _of_transformer(settings.replace(_COMPILED, ""), named)  # of keys of alpha_pattern
    if dropped := [name for name in tensors if _OF_TEXT_ENCODERS.match(name)]:
        log.warning("%s has weights of text encoders, which are left out", file)
    tensors = {name: value for name, value in tensors.items() if name not in dropped}
    _check(tensors, config, named)
    tensors = {name: value.float() for name, value in tensors.items()}
    with reading(f"{named}: its peft configuration"):
        _fold_alphas(tensors, config)
    if wrong := [name for name, value in tensors.items() if not value.isfinite().all()]:
        raise UserError(f"{named}: {min(wrong)}, with its alpha, must have finite values. {_FIX}")
    shapes = layer_shapes(transformer)
    state = _in_names_of(shapes, tensors)
    if state is None:
        cannot = f"{min(tensors)} is in the names of no layer of {type(transformer).__name__}, and diffusers cannot"
        with reading(f"{named}: {cannot} convert it", fix=_RENAME):  # its converters check little
            converted = pipeline_class.lora_state_dict(dict(tensors))
        state = {name.removeprefix(_PREFIXES[0]): value for name, value in converted.items()}
        named += ": by the names to which diffusers converts its own"  # some it drops or gives to another layer
        if (rows := _rows(state)) < _rows(tensors):  # of a B that is several layers, each gets some
            raise UserError(f"{named}, it keeps {rows} of {_rows(tensors)} outputs, so it leaves layers out. {_RENAME}")
    elif of_peft and not beside.is_file():
        raise UserError(
            f"{named}: {beside}, which has the alpha of its layers, is missing. Name a folder that peft saved."
        )
    return _checked(state, shapes, type(transformer).__name__, named)


def _of_transformer(settings: str, named: str) -> dict[str, Any]:
    """Return the peft configuration of the transformer, from diffusers' metadata or from peft's file."""
    with reading(f"{named}: its peft configuration must be a JSON object"):
        items = json.loads(settings).items()
    return {key.removeprefix("transformer."): value for key, value in items if "text_encoder" not in key}


def _check(tensors: Mapping[str, Tensor], config: Mapping[str, Any], named: str) -> None:
    """Raise ``UserError`` for tensors that are not all A, B and alpha of a LoRA."""
    start, rule, fix = config.get("init_lora_weights"), "", _FIX
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        rule = f"its init_lora_weights is {start}, so it updates base weights that peft has changed"
        fix = "Save it by path_initial_model_for_weight_conversion=<its initial adapter>, which converts it."
    elif config.get("alora_invocation_tokens"):
        rule = "it is an aLoRA, which a language model applies to some of its tokens"
    for name, value in tensors.items():
        is_alpha = name.endswith(".alpha") and value.ndim < 2 and value.numel() == 1
        is_factor = _WEIGHT.fullmatch(name) and value.is_floating_point() and value.ndim > 1 and value.numel()
        if not rule and not is_alpha and not is_factor:  # as a bias, or the magnitude of a DoRA
            of = f"{name}, {value.dtype} {list(value.shape)}"
            rule = f"{of}, is neither A nor B of a LoRA in floating point, nor an alpha, and a run trains no more"
    if rule:
        raise UserError(f"{named}: {rule}. {fix}")


def _fold_alphas(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    """Multiply the scale of each layer into its B, in place; an entry <layer>.alpha is then the rank.

    The scale is peft's (``LoraLayer.update_layer``); an entry of the layer itself takes precedence.
    """
    patterns = config.get("alpha_pattern") or {}
    for name in list(tensors):
        match = _WEIGHT.fullmatch(name)
        if match is None or _FACTORS[match["factor"]] != "B":
            continue
        rank, alpha = tensors[name].shape[1], tensors.get(f"{match['layer']}.alpha")
        if alpha is not None:
            tensors[name] = tensors[name] * (alpha.item() / rank)
            tensors[f"{match['layer']}.alpha"] = alpha.new_tensor(float(rank))
        elif config:
            layer = match["layer"]
            for prefix in _PREFIXES:
                layer = layer.removeprefix(prefix)
            scaled = patterns.get(get_pattern_key(patterns, layer), config.get("lora_alpha", LoraConfig.lora_alpha))
            tensors[name] = tensors[name] * (scaled / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _in_names_of(layers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the tensors without their prefix, if all of them are of such layers."""
    for prefix in _PREFIXES:
        names = {name: name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
        matches = [_WEIGHT.fullmatch(short) for short in names.values() if not short.endswith(".alpha")]
        if len(names) == len(tensors) and all(match and match["layer"] in layers for match in matches):
            return {short: tensors[name] for name, short in names.items()}
    return None


def _rows(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of outputs of all layers together."""
    matches = ((_WEIGHT.fullmatch(name), value) for name, value in tensors.items())
    return sum(len(value) for match, value in matches if match and _FACTORS[match["factor"]] == "B")


def _checked(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], model: str, named: str
) -> dict[str, Tensor]:
    """Return A and B of every layer, without the alphas; raises ``UserError`` where they do not fit."""
    factors: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if match := _WEIGHT.fullmatch(name):
            factors.setdefault(match["layer"], {})[_FACTORS[match["factor"]]] = value
    if not factors:
        raise UserError(f"{named}: it has no weights of the layers of {model}. {_FIX}")
    state: dict[str, Tensor] = {}
    for layer, pair in factors.items():
        fits = pair.keys() == {"A", "B"} and pair["A"].shape[0] == pair["B"].shape[1]
        if not fits or (pair["B"].shape[0], *pair["A"].shape[1:]) != shapes.get(layer):
            sizes = " and ".join(f"{name} {list(value.shape)}" for name, value in sorted(pair.items()))
            raise UserError(
                f"{named}: it has {sizes} of {layer}; A and B must be there, and their product of the size of that "
                f"layer of {model}, {shapes.get(layer, 'none')}. {_FIX}"
            )
        state |= {f"{layer}.lora_{name}.weight": pair[name] for name in ("A", "B")}
    return state


@torch.no_grad()
def fuse_lora(pipeline: DiffusionPipeline, source: str) -> dict[str, Tensor]:
    """Add a LoRA to the transformer's weights, in place: W + alpha / rank B A in float32, rounded to the dtype of W.

    Return its tensors, with the scale in B. ``source`` is ``<hub id or folder>/<file>``.
    """
    folder, _, name = source.rpartition("/")
    hint = "Set model.fused_lora=<hub id or folder>/<file>.safetensors."
    read = partial(fetch, folder or ".", key="model.fused_lora", kind="LoRA", hint=hint, value=source)
    file = read(name)
    if name == LORA_FILES[1]:
        read(PEFT_CONFIG)
    named = f"model.fused_lora={source} is invalid"
    state = read_lora_file(file, pipeline.transformer, type(pipeline), named)
    for key in [key for key in state if key.endswith(".lora_A.weight")]:
        layer = key.removesuffix(".lora_A.weight")
        weight = pipeline.transformer.get_submodule(layer).weight
        update = state[f"{layer}.lora_B.weight"].flatten(1) @ state[key].flatten(1)
        weight.copy_(weight.float() + update.view_as(weight))
    return state
