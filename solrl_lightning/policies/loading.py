"""Loading a diffusers pipeline, whole or in part, from a folder or from the hub, with errors that say what to do.

Weights are read from safetensors only. diffusers and transformers fill weights that a file lacks with random numbers
and a warning; here that is an error.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError
from torch import nn

from solrl_lightning.errors import UserError, sentence
from solrl_lightning.hub import fetch as fetch_file
from solrl_lightning.hub import is_path

INDEX = "model_index.json"
ONLY_TRANSFORMER_IN_BF16 = {"transformer": torch.bfloat16, "default": torch.float32}
_MODEL_OF = {"FluxPipeline": "flux1", "StableDiffusion3Pipeline": "sd3", "SanaPipeline": "sana"}


def load_pipeline(
    pipeline_class: type[DiffusionPipeline],
    pretrained: str,
    dtypes: Mapping[str, torch.dtype] = ONLY_TRANSFORMER_IN_BF16,
    variant: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> DiffusionPipeline:
    """The pipeline of a folder or hub id, its models frozen.

    ``pipeline.config._name_or_path`` is the folder that it was read from.

    Args:
        dtypes: of the components by name; ``default`` for all others.
        variant: components that have files of this name (``model.<variant>.safetensors``) are read from those.
        given: components that need not be loaded, because they are here already (or None: they are not needed).

    Raises:
        UserError: there is no such folder or hub id, it may not be read, holds another kind of pipeline, or is damaged.
    """
    given = given or {}
    folder = fetch(pipeline_class, pretrained, variant, without=list(given))
    modules = {}
    # diffusers raises OSError and ValueError, transformers lets SafetensorError and RuntimeError through.
    try:
        for name, component_class in _module_classes(pipeline_class, folder):
            if name not in given:
                dtype = dtypes.get(name, dtypes["default"])
                modules[name] = load_module(component_class, folder / name, dtype, variant)
        pipeline = pipeline_class.from_pretrained(str(folder), **modules, **given)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model.pretrained={pretrained} is a {pipeline_class.__name__}, but its files could not be read: "
            f"{sentence(error)} One of them is missing, damaged, or does not fit its config.json: download or save "
            "the pipeline again."
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def fetch(
    pipeline_class: type[DiffusionPipeline], pretrained: str, variant: str | None = None, without: Sequence[str] = ()
) -> Path:
    """The local folder of a pipeline. From the hub only those components come that are not in ``without``.

    Raises:
        UserError: as ``load_pipeline``, but the weights are not read yet.
    """
    hint = "Or give a local folder that save_pretrained wrote."
    index = fetch_file(pretrained, INDEX, key="model.pretrained", kind="diffusers pipeline", hint=hint)
    _check_class(pipeline_class, pretrained, index.parent)
    if is_path(pretrained):
        _check_complete(pipeline_class, pretrained, index.parent, without)
        return index.parent
    try:
        left_out = dict.fromkeys(without)
        folder = pipeline_class.download(pretrained, variant=variant, use_safetensors=True, **left_out)
    except (OSError, HTTPError) as error:
        raise UserError(
            f"model.pretrained={pretrained} could not be downloaded completely: {sentence(error)} Check the network "
            "and the free space, and give the same command again: it goes on where it stopped."
        ) from error
    return Path(folder)


def _check_class(pipeline_class: type[DiffusionPipeline], pretrained: str, folder: Path) -> None:
    try:
        found = pipeline_class.load_config(str(folder)).get("_class_name", "pipeline of no class")
    except OSError as error:
        raise UserError(
            f"model.pretrained={pretrained} could not be read: {sentence(error)} Download or save the pipeline again."
        ) from error
    if found != pipeline_class.__name__:
        fitting = f"Use model={_MODEL_OF[found]} with it" if found in _MODEL_OF else "Give another folder or hub id"
        raise UserError(f"this model needs a {pipeline_class.__name__}; {pretrained} is a {found}. {fitting}.")


def _check_complete(
    pipeline_class: type[DiffusionPipeline], pretrained: str, folder: Path, without: Sequence[str]
) -> None:
    """Every component to load is here; diffusers would look for the folder of one that is not on the hub."""
    for name, value in pipeline_class.load_config(str(folder)).items():
        is_component = not name.startswith("_") and isinstance(value, list) and None not in value
        if is_component and name not in without and not (folder / name).is_dir():
            raise UserError(
                f"a pipeline folder has a subfolder for every component that its {INDEX} names; {pretrained} has no "
                f"{name}/ ({'.'.join(value)}). Download or save the pipeline again, whole."
            )


def _module_classes(pipeline_class: type[DiffusionPipeline], folder: Path) -> Iterator[tuple[str, Any]]:
    """The components with weights, by name; tokenizers and schedulers are left to diffusers."""
    for name, value in pipeline_class.load_config(str(folder)).items():
        if name.startswith("_") or not isinstance(value, list) or value[0] not in ("diffusers", "transformers"):
            continue
        library, class_name = value
        component_class = getattr(importlib.import_module(library), class_name, None)
        if component_class is None:
            raise ValueError(f"{library} has no {class_name}, which {INDEX} names as {name}")
        if isinstance(component_class, type) and issubclass(component_class, nn.Module):
            yield name, component_class


def load_module(component_class: Any, folder: Path, dtype: torch.dtype, variant: str | None = None) -> Any:
    """The frozen model of a folder, all of whose weights are in its files."""
    has_variant = variant is not None and any(folder.glob(f"*.{variant}[.-]*"))
    module, info = component_class.from_pretrained(
        str(folder),
        dtype=dtype,
        variant=variant if has_variant else None,
        use_safetensors=True,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"every weight of a {component_class.__name__} must be in its files; {folder} lacks {len(missing)} of "
            f"them: {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Download or save it again."
        )
    return module.requires_grad_(False).eval()
