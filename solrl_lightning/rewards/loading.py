"""Loads reward models from a hub id or the disk and checks that every weight is used."""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from solrl_lightning.errors import UserError, sentence
from solrl_lightning.hub import fetch, is_path
from solrl_lightning.rewards.preprocessing import CropToSquare

_BICUBIC = 3  # PIL's number
# transformers raises OSError and ValueError for missing files, and passes on the others for damaged ones.
_READING = (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError)


def floating_dtype(reward: str, dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of a name. Raises ``UserError`` if it is not float32, bfloat16 or float16."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(
            f"reward.{reward}.dtype={dtype} is invalid: it must be float32, bfloat16 or float16. Set "
            f"reward.{reward}.dtype=float32."
        )
    return found


def load_clip(reward: str, pretrained: str, processor: str) -> tuple[Any, Any, CropToSquare]:
    """The CLIPModel of a hub id or folder in float32, and the tokenizer and preprocessing of another, or the same.

    Raises:
        UserError: one of them is missing or damaged, has another architecture, or does not fit the other.
    """
    # Local import, as of open_clip below: the models of one library do not need the other.
    from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

    source = _model_of_type(reward, "pretrained", pretrained, "CLIP model", "clip")
    try:
        model, info = CLIPModel.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    except _READING as error:
        raise UserError(
            f"reward.{reward}.pretrained={pretrained} is invalid: it is a CLIP model, but its weights cannot be read: "
            f"{sentence(error)} A file is missing, is damaged, or does not fit config.json. Download the model again."
        ) from error
    # Older versions of transformers saved position_ids, which are no weights.
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
            f"reward.{reward}.processor={processor} is invalid: it makes images of {preprocess.height} x "
            f"{preprocess.width}, but pretrained={pretrained} takes {side} x {side}. Set reward.{reward}.processor to "
            "the processor of the model's training."
        )
    # CLIP reads the embedding at the end token. transformers takes eos_token_id=2 of old configurations for the last.
    text = model.config.text_config
    end, expected = tokenizer("").input_ids[-1], text.eos_token_id if text.eos_token_id != 2 else text.vocab_size - 1
    if len(tokenizer) > text.vocab_size or end != expected:
        raise UserError(
            f"reward.{reward}.processor={processor} is invalid: its tokenizer has {len(tokenizer)} tokens and ends "
            f"texts with number {end}, but pretrained={pretrained} has {text.vocab_size} and expects {expected}. Set "
            f"reward.{reward}.processor to the processor of the model's training."
        )
    return model, tokenizer, preprocess


def load_detector(reward: str, detector: str) -> tuple[Any, Any]:
    """The Owlv2ForObjectDetection of a hub id or folder in float32, and its processor.

    Raises:
        UserError: it is missing or damaged, or is no OWLv2.
    """
    from transformers import Owlv2ForObjectDetection, Owlv2Processor

    source = _model_of_type(reward, "detector", detector, "detector", "owlv2")
    try:
        model, info = Owlv2ForObjectDetection.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        processor = Owlv2Processor.from_pretrained(source)
    except _READING as error:
        raise _unreadable(reward, "detector", detector, error) from error
    unexpected = [key for key in info["unexpected_keys"] if not key.endswith(".embeddings.position_ids")]
    check_state_dict_keys(reward, detector, info["missing_keys"], unexpected, "detector")
    return model, processor


def load_open_clip(reward: str, pretrained: str, file: str, architecture: str, device: torch.device) -> nn.Module:
    """open_clip's ``architecture`` in float32 on the device, with the file's weights under "state_dict".

    ``pretrained`` is a .pt file, or a folder or hub id with ``file``.

    Raises:
        UserError: the file does not exist, or the weights are damaged or do not fit.
    """
    import open_clip

    path = Path(pretrained).expanduser()
    if not path.is_file():
        hint = f"Or give the path of a local {file}."
        path = fetch(pretrained, file, key=f"reward.{reward}.pretrained", kind=f"{reward} checkpoint", hint=hint)
    content = load_tensors(reward, path)
    weights = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        found = f"the keys {sorted(map(str, content))[:5]}" if isinstance(content, dict) else type(content).__name__
        raise UserError(
            f"reward.{reward}.pretrained={pretrained} is invalid: it must be a checkpoint with tensors under the key "
            f"state_dict; {path} holds {found}. Set reward.{reward}.pretrained to the published file."
        )
    # open_clip.create_model would log that nothing pretrained was loaded, and resize embeddings that do not fit.
    config, unfit = open_clip.get_model_config(architecture), f"it does not fit {architecture}"
    with torch.device("meta"):
        check_state_dict(reward, pretrained, open_clip.CLIP(**config), weights, unfit, "Give the published file.")
    with device:  # the constructor draws a billion random numbers, which load_state_dict overwrites
        model = open_clip.CLIP(**config)
    model.load_state_dict(weights)
    return model


def load_tensors(reward: str, file: Path) -> Any:
    """The content of a file of torch.save. Raises ``UserError`` if the file is damaged or holds code."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    # torch's unpickler also raises LookupError and ValueError for damaged files.
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, UnpicklingError) as error:
        raise UserError(
            f"the file {file} of the reward {reward} is invalid: it cannot be read as weights: {sentence(error)} "
            "Delete it and download it again, or give another file."
        ) from error


def check_state_dict(
    reward: str,
    pretrained: str,
    model: nn.Module,
    weights: Mapping[str, Tensor],
    unfit: str,
    fix: str,
    argument: str = "pretrained",
) -> None:
    """Raise ``UserError`` unless ``weights`` have the names and shapes of the model's."""
    own = model.state_dict()
    check_state_dict_keys(reward, pretrained, own.keys() - weights.keys(), weights.keys() - own.keys(), argument)
    misfits = [name for name in own if own[name].shape != weights[name].shape]
    if misfits:
        name = misfits[0]
        raise UserError(
            f"reward.{reward}.{argument}={pretrained} is invalid: {unfit}: {len(misfits)} tensors have another shape, "
            f"such as {name} with {list(weights[name].shape)} for {list(own[name].shape)}. {fix}"
        )


def check_state_dict_keys(
    reward: str, pretrained: str, missing: Any, unexpected: Any, argument: str = "pretrained"
) -> None:
    """Raise ``UserError`` if there are missing or unexpected keys."""
    for what, keys in (("lacks", missing), ("has unexpectedly", unexpected)):
        if keys:
            raise UserError(
                f"reward.{reward}.{argument}={pretrained} is invalid: it {what} {len(keys)} tensors, such as "
                f"{min(keys)}, so these are not the weights of this model. Set reward.{reward}.{argument} to the "
                "published weights."
            )


def _model_of_type(reward: str, argument: str, name: str, kind: str, model_type: str) -> str:
    """The argument of from_pretrained for a hub id or folder. Raises ``UserError`` for a model of another type."""
    from transformers import PretrainedConfig

    source = _source(reward, argument, name, "config.json", kind)
    try:
        found = PretrainedConfig.get_config_dict(source)[0].get("model_type", "model of no type")
    except (OSError, ValueError) as error:
        raise _unreadable(reward, argument, name, error) from error
    if found != model_type:
        raise UserError(
            f"reward.{reward}.{argument}={name} is invalid: it must be a {kind} of type {model_type}, and is a "
            f"{found}. Remove the override of reward.{reward}.{argument}, or give a {kind} of that type."
        )
    return source


def _source(reward: str, argument: str, name: str, file: str, kind: str = "CLIP model") -> str:
    """The argument of from_pretrained for a hub id or folder. Raises ``UserError`` if ``file`` is not in it."""
    hint = "Or give a local folder that save_pretrained wrote."
    fetch(name, file, key=f"reward.{reward}.{argument}", kind=kind, hint=hint)
    return str(Path(name).expanduser()) if is_path(name) else name


def _unreadable(reward: str, argument: str, name: str, error: Exception) -> UserError:
    return UserError(
        f"reward.{reward}.{argument}={name} is invalid: it cannot be loaded: {sentence(error)} A file is missing or "
        "damaged. Save or download it again."
    )


def _crop_to_square(reward: str, processor: str, images: Any) -> CropToSquare:
    """The parameters of a CLIPImageProcessor. Raises ``UserError`` if it has other steps than CLIP's."""
    steps = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
    skipped = [step for step in steps if not getattr(images, step)]
    size, crop = dict(images.size), dict(images.crop_size)
    shortest = size.get("shortest_edge") or 0
    if skipped or size.get("longest_edge") or shortest < max(crop.values()) or int(images.resample) != _BICUBIC:
        raise UserError(
            f"reward.{reward}.processor={processor} is invalid: it must resize the shortest side (bicubic), crop, "
            f"rescale and normalise; it has size={size}, crop_size={crop}, "
            f"resample={int(images.resample)}{''.join(f', {step}=false' for step in skipped)}. Set "
            f"reward.{reward}.processor to that of a CLIP model."
        )
    mean, std = (tuple(float(value) for value in values) for values in (images.image_mean, images.image_std))
    return CropToSquare(shortest, crop["height"], crop["width"], mean, std)
