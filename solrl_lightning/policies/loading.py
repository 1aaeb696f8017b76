"""Loading a diffusers pipeline folder or hub id, with errors that say what to do."""

from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from safetensors import SafetensorError

from solrl_lightning.errors import UserError


def load_pipeline(pipeline_class: type[DiffusionPipeline], pretrained: str) -> DiffusionPipeline:
    """The pipeline with its transformer in bfloat16 and all other components in float32.

    Raises:
        UserError: there is no such folder or hub id, it holds another kind of pipeline, or its files are damaged.
    """
    local = Path(pretrained).expanduser()
    if local.exists() or local.is_absolute() or pretrained.startswith("."):
        if not (local / "model_index.json").is_file():
            raise UserError(
                f"model.pretrained must be a diffusers pipeline folder or a hub id; {pretrained} holds no "
                "model_index.json. Give the folder that save_pretrained wrote."
            )
        pretrained = str(local)
    try:
        config = pipeline_class.load_config(pretrained)
    except OSError as error:
        raise UserError(
            f"model.pretrained={pretrained} could not be loaded: {_sentence(error)} Check the name and the network, "
            "log in with `hf auth login` if the model is gated, or give a local pipeline folder."
        ) from error
    found = config.get("_class_name", "pipeline of no class")
    if found != pipeline_class.__name__:
        raise UserError(
            f"this model needs a {pipeline_class.__name__}; {pretrained} is a {found}. "
            "Choose the model= that fits the folder."
        )
    dtypes = {"transformer": torch.bfloat16, "default": torch.float32}
    try:
        pipeline = pipeline_class.from_pretrained(pretrained, dtype=dtypes)
    # diffusers raises OSError and ValueError, transformers lets SafetensorError and RuntimeError through.
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model.pretrained={pretrained} is a {found}, but its files could not be read: {_sentence(error)} One of "
            "them is missing, damaged, or does not fit its config.json: download or save the pipeline again."
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _sentence(error: Exception) -> str:
    return f"{str(error).rstrip('. ')}."
