"""Loads reward models from a hub id or the disk and checks that every weight is used."""

from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from solrl_lightning.errors import UserError, sentence
from solrl_lightning.hub import fetch, is_path
from solrl_lightning.rewards.preprocessing import CropToSquare

_BICUBIC = 3  # PIL's number
_PLAIN_CLIP = {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu"}  # what open_clip says of a CLIP like OpenAI's
_OTHER_TEXT = {"hf_model_name", "hf_tokenizer_name", "tokenizer_kwargs"}


class CLIPParts(NamedTuple):
    """A CLIP of transformers, its tokenizer and its preprocessing."""

    model: Any  # CLIPModel, float32, on the CPU
    tokenizer: Any
    preprocess: CropToSquare


def floating_dtype(reward: str, dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of a name. Raises ``UserError`` if it is not float32, bfloat16 or float16."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(f"the reward {reward} runs in dtype float32, bfloat16 or float16; got {dtype}.")
    return found


def load_clip(reward: str, pretrained: str, processor: str) -> CLIPParts:
    """The CLIP of a hub id or folder, and the image processor and tokenizer of another (or the same) one.

    Raises:
        UserError: one of them is not there, is of another architecture, is damaged, or they do not fit each other.
    """
    # Here, as open_clip below: neither is needed for the other's models.
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

    source = _source(reward, "pretrained", pretrained, "config.json")
    try:
        kind = CLIPConfig.get_config_dict(source)[0].get("model_type", "model of no type")
    except (OSError, ValueError) as error:
        raise _unreadable(reward, "pretrained", pretrained, error) from error
    if kind != "clip":
        raise UserError(f"the reward {reward} needs a CLIP model of type clip; pretrained={pretrained} is a {kind}.")
    try:
        model, info = CLIPModel.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    # transformers raises OSError and ValueError for missing files, lets RuntimeError and SafetensorError through.
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise UserError(
            f"the reward {reward}: pretrained={pretrained} is a CLIP model, but its weights could not be read: "
            f"{sentence(error)} A file is missing, damaged, or does not fit config.json: download the model again."
        ) from error
    # The numbering of the positions, which older versions saved as a tensor, is no weight.
    unexpected = [key for key in info["unexpected_keys"] if not key.endswith(".embeddings.position_ids")]
    check_state_dict_keys(reward, pretrained, info["missing_keys"], unexpected)

    source = _source(reward, "processor", processor, "tokenizer_config.json")
    try:
        images, tokenizer = CLIPImageProcessor.from_pretrained(source), CLIPTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise _unreadable(reward, "processor", processor, error) from error
    preprocess = _crop_to_square(reward, processor, images)
    side = model.config.vision_config.image_size
    if (preprocess.height, preprocess.width) != (side, side):
        raise UserError(
            f"the reward {reward}: processor={processor} makes images of {preprocess.height} x {preprocess.width}, but "
            f"pretrained={pretrained} takes {side} x {side}. Give the processor that the model was trained with."
        )
    # The embedding is read at the end token. Old configurations say 2, which transformers takes for the last one.
    text = model.config.text_config
    end, expected = tokenizer("").input_ids[-1], text.eos_token_id if text.eos_token_id != 2 else text.vocab_size - 1
    if len(tokenizer) > text.vocab_size or end != expected:
        raise UserError(
            f"the reward {reward}: processor={processor} has {len(tokenizer)} tokens and ends texts with number {end}, "
            f"but pretrained={pretrained} has {text.vocab_size} and expects {expected}. Give the processor that the "
            "model was trained with."
        )
    return CLIPParts(model, tokenizer, preprocess)


def load_open_clip(reward: str, pretrained: str, file: str, architecture: str, device: torch.device) -> nn.Module:
    """open_clip's ``architecture`` in float32 on the device, with the weights under "state_dict".

    ``pretrained`` is a .pt file, or a folder or hub id with ``file``.

    Raises:
        UserError: there is no such architecture or file, or its weights are damaged or do not all fit.
    """
    import open_clip

    config = open_clip.get_model_config(architecture)
    if config is None:
        near = " or ".join(get_close_matches(architecture, open_clip.list_models(), 3)) or "ViT-H-14"
        raise UserError(
            f"the reward {reward}: architecture={architecture} is none of open_clip's. Give one that "
            f"open_clip.list_models() names, such as {near}."
        )
    if config.keys() - _PLAIN_CLIP or config["text_cfg"].keys() & _OTHER_TEXT:
        raise UserError(
            f"the reward {reward} needs an open_clip architecture with CLIP's own text tower and tokenizer, such as "
            f"ViT-H-14; {architecture} has others."
        )
    path = Path(pretrained).expanduser()
    if not path.is_file():
        hint = f"Or give the path of a local {file}."
        path = fetch(pretrained, file, key=f"the reward {reward}: pretrained", kind=f"{reward} checkpoint", hint=hint)
    content = load_tensors(reward, path)
    weights = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        found = f"the keys {sorted(map(str, content))[:5]}" if isinstance(content, dict) else type(content).__name__
        raise UserError(
            f"the reward {reward} needs a checkpoint with its tensors under the key state_dict; {path} holds {found}. "
            "Give the published file."
        )
    # Not open_clip.create_model, which logs that nothing pretrained was loaded and resizes embeddings that do not fit.
    with device:  # a billion random numbers to overwrite
        model = open_clip.CLIP(**config)
    own = model.state_dict()
    misfits = [key for key in own.keys() & weights.keys() if own[key].shape != weights[key].shape]
    if misfits:
        key = min(misfits)
        raise UserError(
            f"the reward {reward}: pretrained={pretrained} does not fit architecture={architecture}: {len(misfits)} "
            f"tensors have another shape, such as {key} with {list(weights[key].shape)} for {list(own[key].shape)}. "
            "Name the architecture that the weights are of."
        )
    check_state_dict_keys(reward, pretrained, own.keys() - weights.keys(), weights.keys() - own.keys())
    model.load_state_dict(weights)
    return model


def load_tensors(reward: str, file: Path) -> Any:
    """The content of a checkpoint of torch.save. Raises ``UserError`` if it is damaged or holds code."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    # The unpickler raises LookupError and ValueError for damaged files, too.
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, UnpicklingError) as error:
        raise UserError(
            f"the reward {reward}: {file} could not be read as weights: {sentence(error)} Delete it and download it "
            "again, or give another file."
        ) from error


def check_state_dict_keys(reward: str, pretrained: str, missing: Any, unexpected: Any) -> None:
    """Raises ``UserError`` if weights are missing or left over."""
    for what, keys in (("lacks", missing), ("has, beyond what the model knows,", unexpected)):
        if keys:
            raise UserError(
                f"the reward {reward}: pretrained={pretrained} {what} {len(keys)} tensors, such as {min(keys)}. These "
                "are not the weights of this model: give the published ones."
            )


def _source(reward: str, argument: str, name: str, file: str) -> str:
    """The argument of from_pretrained for a hub id or folder that holds ``file``."""
    hint = "Or give a local folder that save_pretrained wrote."
    fetch(name, file, key=f"the reward {reward}: {argument}", kind="CLIP model", hint=hint)
    return str(Path(name).expanduser()) if is_path(name) else name


def _unreadable(reward: str, argument: str, name: str, error: Exception) -> UserError:
    return UserError(
        f"the reward {reward}: {argument}={name} could not be loaded: {sentence(error)} A file is missing or damaged: "
        "save or download it again."
    )


def _crop_to_square(reward: str, processor: str, images: Any) -> CropToSquare:
    """The parameters of a CLIPImageProcessor. Raises ``UserError`` if it has other steps than CLIP's."""
    steps = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
    skipped = [step for step in steps if not getattr(images, step)]
    size, crop = dict(images.size), dict(images.crop_size)
    shortest = size.get("shortest_edge") or 0
    if skipped or size.get("longest_edge") or shortest < max(crop.values()) or int(images.resample) != _BICUBIC:
        raise UserError(
            f"the reward {reward} resizes the shortest side (bicubic), crops, rescales and normalises, but "
            f"processor={processor} has size={size}, crop_size={crop}, resample={int(images.resample)}"
            f"{''.join(f', {step}=false' for step in skipped)}. Give the processor of a CLIP model."
        )
    mean, std = (tuple(float(value) for value in values) for values in (images.image_mean, images.image_std))
    return CropToSquare(shortest, crop["height"], crop["width"], mean, std)
