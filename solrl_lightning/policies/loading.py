"""Loading a diffusers pipeline, whole or in part, from a folder or from the hub.

Weights are read from safetensors only. diffusers and transformers fill missing weights with random numbers and warn;
here a missing weight is an error.
"""

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from huggingface_hub.errors import HTTPError
from safetensors import safe_open
from torch import nn
from transformers.utils import logging as transformers_logging

from solrl_lightning import policies
from solrl_lightning.artifacts.complete import check_complete, check_json, note_unused, reading
from solrl_lightning.artifacts.hub import fetch as fetch_file
from solrl_lightning.artifacts.hub import is_path
from solrl_lightning.errors import UserError, sentence
from solrl_lightning.policies.config_files import INDEX

_OF_WAN_22 = ("transformer_2", "boundary_ratio", "expand_timesteps")  # in the index of a WanPipeline
_NULL = [None, None]  # in the index, of a component that was None when the pipeline was saved
ONLY_TRANSFORMER_IN_BF16 = {"transformer": torch.bfloat16, "default": torch.float32}


@contextmanager
def errors_only() -> Iterator[None]:
    """Hide the warnings of diffusers and transformers."""
    libraries = diffusers_logging, transformers_logging
    levels = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
    try:
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)


def load_pipeline(
    pipeline_class: type[DiffusionPipeline],
    pretrained: str,
    dtypes: Mapping[str, torch.dtype] = ONLY_TRANSFORMER_IN_BF16,
    variant: str | None = None,
    components: Mapping[str, Any] | None = None,
    check: Callable[[Path], None] | None = None,
    optional: Sequence[str] = (),
) -> DiffusionPipeline:
    """Load the pipeline of a folder or hub id, its models frozen. ``pipeline.config._name_or_path`` is its folder.

    Args:
        dtypes: dtype of each component by name; ``default`` for all others.
        variant: components that have files of this name (``model.<variant>.safetensors``) are read from those.
        components: those that are not loaded: existing modules, or None.
        check: called with the folder before weights are read.
        optional: components that the folder's index may set to ``[null, null]``, and the pipeline then does without.
    """
    modules, components = {}, components or {}
    with reading(f"model.pretrained={pretrained} is invalid"):
        folder = fetch(pipeline_class, pretrained, variant, list(components), optional)
        nulls = {name: None for name in optional if pipeline_class.load_config(str(folder))[name] == _NULL}
        components = nulls | {**components}
        if check is not None:
            check(folder)
        for name, place in _components(folder):
            cls = _class_of(*place)
            if name not in components and isinstance(cls, type) and issubclass(cls, nn.Module):
                with reading(f"model.pretrained={pretrained} is invalid: its {name}"):
                    modules[name] = load_module(cls, folder / name, dtypes.get(name, dtypes["default"]), variant)
        pipeline = pipeline_class.from_pretrained(str(folder), **modules, **components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def fetch(
    pipeline_class: type[DiffusionPipeline],
    pretrained: str,
    variant: str | None = None,
    without: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> Path:
    """Return the local folder of a pipeline; components in ``without`` are not downloaded."""
    hint = "Or give a local folder that save_pretrained wrote."
    index = fetch_file(pretrained, INDEX, key="model.pretrained", kind="diffusers pipeline", hint=hint)
    check_class(pipeline_class, pretrained, index.parent)
    _check_names(pipeline_class, pretrained, json.loads(index.read_text()), optional)
    if is_path(pretrained):
        _check_complete(pipeline_class, pretrained, index.parent, without)
        return index.parent
    try:
        left_out = dict.fromkeys(without)
        folder = pipeline_class.download(pretrained, variant=variant, use_safetensors=True, **left_out)
    except (OSError, HTTPError) as error:
        raise UserError(
            f"model.pretrained={pretrained} could not be downloaded completely: {sentence(error)} Check the network "
            "and the free space, and give the same command again: it resumes where it stopped."
        ) from error
    return Path(folder)


def check_class(pipeline_class: type[DiffusionPipeline], pretrained: str, folder: Path) -> None:
    """Raise UserError unless the index of a pipeline folder is of this class, with one transformer."""
    check_json("model.pretrained", pretrained, folder / INDEX)
    index = json.loads((folder / INDEX).read_text())
    name = index.get("_class_name", "pipeline of no class")
    if name != pipeline_class.__name__:
        model = _model_of(name)
        advice = f"Use model={model} with it" if model else "Give another folder or hub id"
        raise UserError(f"this model needs a {pipeline_class.__name__}; {pretrained} is a {name}. {advice}.")
    for key in _OF_WAN_22:
        if index.get(key) not in (None, False, [None, None]):
            raise UserError(
                f"model.pretrained={pretrained} is invalid: it has {key}, of Wan 2.2, and this model trains one "
                "transformer that gets one time. Set model.pretrained=Wan-AI/Wan2.1-T2V-1.3B-Diffusers."
            )


def _check_names(
    pipeline_class: type[DiffusionPipeline], pretrained: str, index: Mapping[str, Any], optional: Sequence[str]
) -> None:
    """Raise UserError unless the index has a library and a class for every component that the model needs."""
    names, _ = pipeline_class._get_signature_keys(pipeline_class)
    for name in sorted({*names} - {*pipeline_class._optional_components} | {"transformer"}):
        is_null = index.get(name) == _NULL and name not in optional
        if not isinstance(index.get(name), list) or len(index[name]) != 2 or is_null:
            raise UserError(
                f"model.pretrained={pretrained} is invalid: its {INDEX} must name the library and the class of {name}, "
                f"and has {json.dumps(index.get(name))} for it. Download or save the pipeline again."
            )


def _model_of(pipeline_class: str) -> str | None:
    """Return the name of the policy file whose class has this ``pipeline_class``."""
    for file in pkgutil.iter_modules(policies.__path__, f"{policies.__name__}."):
        for value in vars(importlib.import_module(file.name)).values():
            if getattr(getattr(value, "pipeline_class", None), "__name__", "") == pipeline_class:
                return file.name.rpartition(".")[2]
    return None


@cache
def _chats(pipeline_class: type[DiffusionPipeline]) -> bool:
    """Return whether a pipeline writes prompts as messages of a chat."""
    return "apply_chat_template" in inspect.getsource(pipeline_class)


def _check_complete(
    pipeline_class: type[DiffusionPipeline], pretrained: str, folder: Path, without: Sequence[str]
) -> None:
    """Check that all component folders exist; diffusers would look for a missing one on the hub."""
    chats = _chats(pipeline_class)  # type: ignore[arg-type]  # a class is hashable
    for name, (library, class_name) in _components(folder):
        if name in without:
            continue
        if not (folder / name).is_dir():
            raise UserError(
                f"a pipeline folder has a subfolder for every component that its {INDEX} names; {pretrained} has no "
                f"{name}/ ({library}.{class_name}). Download or save the pipeline again, whole."
            )
        # diffusers and transformers replace some files that are missing by defaults, such as a tokenizer without words.
        if isinstance(cls := _class_of(library, class_name), type):
            check_complete("model.pretrained", pretrained, cls, name, chats)


def _components(folder: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the name of each component in the index of a pipeline folder, with its library and class."""
    for name, value in json.loads((folder / INDEX).read_text()).items():
        if not name.startswith("_") and isinstance(value, list) and None not in value:
            yield name, (value[0], value[1])


def _class_of(library: str, name: str) -> Any:
    """Return the class of diffusers or transformers; None for another library."""
    if library not in ("diffusers", "transformers"):
        return None
    if (cls := getattr(importlib.import_module(library), name, None)) is None:
        raise UserError(f"{INDEX} names {name} of {library}, which has none. Update it: pip install -U {library}.")
    return cls


def _dtype_that_is_quantized(files: Iterable[Path]) -> str | None:
    """Return a dtype of 8 bits, or of whole numbers as weights, that safetensors files have; None if none.

    The libraries would cast it without its scales. The names of dtypes are from
    https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs.
    """
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                dtype = str(opened.get_slice(name).get_dtype())
                is_weight = name.endswith((".weight", ".bias")) or dtype in ("I8", "U8") or dtype.startswith("F8")
                if is_weight and dtype not in ("BF16", "F16", "F32", "F64"):
                    return dtype
    return None


def files_of_variant(folder: Path, variant: str | None) -> list[Path]:
    """Return the weights of a component that are in files of this variant."""
    return sorted(folder.glob(f"[!.]*.{variant}[.-]*safetensors")) if variant else []


def load_module(component_class: Any, folder: Path, dtype: torch.dtype, variant: str | None = None) -> Any:
    """Return the frozen model of a folder. A weight that is missing from its files is an error."""
    config = json.loads((folder / "config.json").read_text())
    of_variant = files_of_variant(folder, variant)
    read = of_variant or [file for file in folder.glob("[!.]*.safetensors") if file.name.count(".") == 1]
    others = sorted(file.name for file in folder.glob("[!.]*") if file.suffix in (".safetensors", ".bin"))
    problem = ""
    if others and not read:
        problem = (
            f"with model.variant={variant or 'null'} its weights must be in *.safetensors, and are in {others[0]}. "
            "Set model.variant=<word> for *.<word>.safetensors; save others again by save_pretrained(<folder>) of "
            "diffusers, without safe_serialization=False."
        )
    elif method := (config.get("quantization_config") or {}).get("quant_method") or _dtype_that_is_quantized(read):
        problem = (
            f"its weights are quantised ({method}), and must be of 16 or 32 bits. Give the model's folder from before "
            "its quantisation."
        )
    if problem:
        raise UserError(f"{folder} is invalid: {problem}")
    options = dict(dtype=dtype, variant=variant if of_variant else None, use_safetensors=True)
    module, info = component_class.from_pretrained(str(folder), output_loading_info=True, **options)
    missing = sorted(info["missing_keys"])
    if not missing:  # a sum takes a twentieth of the seconds of isfinite().all(); in float16 it may overflow
        suspects = {name: weight for name, weight in module.named_parameters() if not weight.sum().isfinite()}
        missing = [name for name, weight in suspects.items() if not weight.isfinite().all()]
    if missing:
        raise UserError(
            f"every weight of a {component_class.__name__} must be in its files, and finite; {folder} lacks "
            f"{len(missing)} of them, such as {missing[0]}. Download it again, or save it again after "
            "pipe.unload_lora_weights()."
        )
    note_unused(folder, info["unexpected_keys"])
    return module.requires_grad_(False).eval()
