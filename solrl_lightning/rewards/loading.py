"""Loads reward models from a hub id or the disk and checks that every weight is used."""

import math
from os.path import expanduser
from typing import Any

import torch
from torch import nn

from solrl_lightning.artifacts.complete import check_complete, reading
from solrl_lightning.artifacts.files import check_state_dict, check_state_dict_keys, load_tensors
from solrl_lightning.artifacts.hub import fetch
from solrl_lightning.errors import UserError
from solrl_lightning.rewards.preprocessing import CropToSquare

_HINT = "Or give a local folder that save_pretrained wrote."
_BICUBIC = 3  # PIL's number


def floating_dtype(reward: str, dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype of a name. Raises ``UserError`` if it is not float32, bfloat16 or float16."""
    value = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(value, torch.dtype) or value not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(
            f"reward.{reward}.dtype={dtype} is invalid: it must be float32, bfloat16 or float16. Set "
            f"reward.{reward}.dtype=float32."
        )
    return value


def load_clip(reward: str, pretrained: str, processor: str) -> tuple[Any, Any, CropToSquare]:
    """Load the CLIPModel of a hub id or folder in float32, and the tokenizer and preprocessing of another, or the same.

    Raises:
        UserError: one of them is missing or damaged, has another architecture, or does not fit the other.
    """
    # Local import, as of open_clip below: models of one library do not need the other.
    from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

    model = load_pretrained(CLIPModel, f"reward.{reward}.pretrained", pretrained, "CLIP model")
    key = f"reward.{reward}.processor"
    parts = (CLIPTokenizer, CLIPImageProcessor)
    tokenizer, images = read_parts(key, processor, "tokenizer_config.json", "CLIP model", *parts)
    # CLIP reads the embedding at the end token. transformers takes eos_token_id=2 of old configurations for the last.
    text = model.config.text_config
    with reading(f"{key}={processor} is invalid"):
        preprocess = _crop_to_square(key, processor, images)
        end = tokenizer("").input_ids[-1]
    expected = text.eos_token_id if text.eos_token_id != 2 else text.vocab_size - 1
    crop, side, misfit = (preprocess.height, preprocess.width), model.config.vision_config.image_size, ""
    if len(tokenizer) > text.vocab_size or end != expected:
        misfit = f"its tokenizer has {len(tokenizer)} tokens and ends texts with number {end}, but "
        misfit += f"pretrained={pretrained} has {text.vocab_size} and expects {expected}"
    elif crop != (side, side):
        misfit = f"it crops images to {crop[0]} x {crop[1]} pixels, but pretrained={pretrained} takes {side} x {side}"
    if misfit:
        raise UserError(f"{key}={processor} is invalid: {misfit}. Set {key} to the processor of the model's training.")
    return model, tokenizer, preprocess


def read_parts(
    key: str, name: str, file: str, kind: str, *parts: Any, chats: bool = False, **options: Any
) -> list[Any]:
    """Read a configuration, tokenizer or processor of each class of ``parts`` from a hub id or folder with ``file``.

    ``chats``: with a chat template; ``options``: of ``from_pretrained``.
    """
    from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin

    made: dict[Any, Any] = {AutoTokenizer: PreTrainedTokenizerBase, AutoProcessor: ProcessorMixin}
    fetch(name, file, key=key, kind=kind, hint=_HINT)
    for part in parts:
        check_complete(key, name, made.get(part, part), chats=chats)
    with reading(f"{key}={name} is invalid: it cannot be read as a {kind}"):
        return [part.from_pretrained(expanduser(name), **options) for part in parts]


def load_open_clip(reward: str, pretrained: str, file: str, architecture: str, device: torch.device) -> nn.Module:
    """Return open_clip's ``architecture`` in float32 on the device, with the file's weights under "state_dict".

    ``pretrained`` is a .pt file, or a folder or hub id with ``file``.
    """
    import open_clip

    key, hint = f"reward.{reward}.pretrained", f"Or give the path of a local {file}."
    weights = load_tensors(key, pretrained, file, kind=f"{reward} checkpoint", hint=hint)
    # open_clip.create_model logs that no pretrained weights were loaded, and resizes embeddings that do not fit.
    config, unfit = open_clip.get_model_config(architecture), f"it does not fit {architecture}"
    with torch.device("meta"):
        state = open_clip.CLIP(**config).state_dict()
    check_state_dict(key, pretrained, state, weights, unfit, "Give the published file.")
    with device:  # the constructor draws a billion random numbers, which load_state_dict overwrites
        model = open_clip.CLIP(**config)
    model.load_state_dict(weights)
    return model


def load_pretrained(cls: Any, key: str, name: str, kind: str) -> Any:
    """Load the model of transformers' class ``cls`` in float32, of a hub id or folder. Raises ``UserError``."""
    from transformers import PretrainedConfig, PreTrainedModel

    fetch(name, "config.json", key=key, kind=kind, hint=_HINT)
    check_complete(key, name, PreTrainedModel)
    expected = cls.config_class.model_type
    model_type = PretrainedConfig.get_config_dict(expanduser(name))[0].get("model_type", "model of no type")
    if model_type != expected:
        raise UserError(
            f"{key}={name} is invalid: it must be a {kind} of type {expected}, and is a {model_type}. Remove the "
            f"override of {key}, or give a {kind} of that type."
        )
    model, info = load_weights(cls, key, name, kind)
    # Older versions of transformers saved position_ids, which are no weights.
    unexpected = [tensor for tensor in info["unexpected_keys"] if not tensor.endswith(".embeddings.position_ids")]
    check_state_dict_keys(key, name, [], unexpected)
    return model


def load_weights(
    cls: Any, key: str, name: str, kind: str, dtype: torch.dtype = torch.float32
) -> tuple[Any, dict[str, Any]]:
    """Return the model of transformers' class ``cls`` of a hub id or folder, and transformers' record of it."""
    options = dict(dtype=dtype, output_loading_info=True, trust_remote_code=False)
    with reading(f"{key}={name} is invalid: its weights cannot be read as a {kind}'s"):
        model, info = cls.from_pretrained(expanduser(name), **options)
    check_state_dict_keys(key, name, info["missing_keys"], [])
    return model, info


def _crop_to_square(key: str, processor: str, images: Any) -> CropToSquare:
    """Return the parameters of a CLIPImageProcessor. Raises ``UserError`` if it has other steps than CLIP's."""
    steps = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
    skipped = [step for step in steps if not getattr(images, step)]
    size, crop = dict(images.size), dict(images.crop_size)
    shortest = size.get("shortest_edge") or 0
    scales = not math.isclose(images.rescale_factor, 1 / 255, rel_tol=1e-3)
    if (
        skipped
        or scales
        or size.get("longest_edge")
        or shortest < max(crop.values())
        or int(images.resample) != _BICUBIC
    ):
        raise UserError(
            f"{key}={processor} is invalid: it must resize the shortest side (bicubic), crop, rescale and normalise; "
            f"it has size={size}, crop_size={crop}, resample={int(images.resample)}, "
            f"rescale_factor={images.rescale_factor:.3g}"
            f"{''.join(f', {step}=false' for step in skipped)}. Set {key} to the processor of a CLIP model."
        )
    return CropToSquare(shortest, crop["height"], crop["width"], list(images.image_mean), list(images.image_std))
