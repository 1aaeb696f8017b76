"""Models without files of weights, for plans and timings at real size without a download.

An architecture is read from the config files of a pipeline folder; ``assets/architectures`` has the files of
published pipelines. Its pipeline has random weights, which keep activations of the order of one through any number of
blocks, and the real scheduler, but no text encoders: prompts get random embeddings of the true shapes, a function of
their text alone. On the device ``meta`` everything has shapes only.
"""

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import local_torch_dtype

from solrl_lightning.artifacts.complete import check_json, reading
from solrl_lightning.artifacts.hub import is_path
from solrl_lightning.errors import UserError
from solrl_lightning.policies.config_files import ARCHITECTURES, INDEX, config_folder
from solrl_lightning.policies.loading import check_class
from solrl_lightning.seeds import noise

_LIBRARIES = {"diffusers": diffusers, "transformers": transformers}


class Component(NamedTuple):
    """One part of a pipeline."""

    library: str  # diffusers or transformers
    cls: str
    config: Mapping[str, Any]  # constructor arguments that differ from the class's defaults, or a whole config.json


class Architecture(NamedTuple):
    """A pipeline without weights. Tokenizers are left out."""

    name: str  # the folder or hub id that it was found by
    pipeline: str  # class of diffusers
    components: Mapping[str, Component]


def find_architecture(pretrained: str, pipeline_class: type[diffusers.DiffusionPipeline]) -> Architecture:
    """Return the architecture of a local pipeline folder, or of a hub id whose config files the package has.

    Raises:
        UserError: there are no such config files, or they describe another kind of pipeline.
    """
    folder = config_folder(pretrained)
    if folder is None:
        known = sorted(str(index.parent.relative_to(ARCHITECTURES)) for index in ARCHITECTURES.rglob(INDEX))
        source = "<its hub id>" if is_path(pretrained) else pretrained
        raise UserError(
            f"model.pretrained={pretrained} is invalid: without weights, a model must be a folder with config files or "
            f"one of {', '.join(known)}. Download its config files: hf download {source} --include '*.json' "
            "--local-dir <folder>, and set model.pretrained=<folder>."
        )
    check_class(pipeline_class, pretrained, folder)
    return read_architecture(folder)._replace(name=pretrained)


def read_architecture(folder: Path) -> Architecture:
    """Return the architecture that a diffusers pipeline folder describes in its config files.

    Raises:
        UserError: a file is absent or damaged.
    """
    index = json.loads((folder / INDEX).read_text())
    components = {}
    for name, entry in index.items():
        files = (folder / name / "config.json", folder / name / "scheduler_config.json")
        file = next((file for file in files if file.is_file()), None)
        if file is not None and not name.startswith("tokenizer"):
            check_json("model.pretrained", str(folder), file)
            library, cls = entry
            components[name] = Component(library, cls, json.loads(file.read_text()))
    if lacking := [name for name in ("transformer", "vae", "scheduler") if name not in components]:
        raise UserError(
            f"model.pretrained={folder} is invalid: a pipeline folder has config files of all its parts, and this one "
            f"has none of {' and '.join(lacking)}. Download or save the pipeline again, whole."
        )
    return Architecture(str(folder), index["_class_name"], components)


def build_component(component: Component, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the component with the initial weights of its class, created on ``device`` in ``dtype``.

    On the device ``meta`` it has shapes and no storage.
    """
    cls = getattr(_LIBRARIES[component.library], component.cls)
    with torch.device(device), local_torch_dtype(dtype):
        if component.library == "transformers":
            return cls(cls.config_class(**component.config))
        return cls.from_config(dict(component.config))


# Random weights


def random_pipeline(
    architecture: Architecture, device: torch.device | str, dtypes: Mapping[str, torch.dtype]
) -> diffusers.DiffusionPipeline:
    """Make the pipeline of ``architecture`` without text encoders, its parts on ``device``.

    The weights are equal in every call on equal hardware. ``dtypes`` are by name of the component, and ``default``.
    """
    parts = architecture.components
    cls = getattr(diffusers, architecture.pipeline)
    modules = {}
    for name in ("transformer", "vae"):
        with reading(f"model.pretrained={architecture.name} is invalid: its {name}"):
            modules[name] = random_component(parts[name], device, dtypes.get(name, dtypes["default"]))
    modules["scheduler"] = build_component(parts["scheduler"], "cpu")
    parameters = inspect.signature(cls.__init__).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty][1:]  # after self
    pipeline = cls(**dict.fromkeys(required) | modules)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def random_component(component: Component, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Any:
    """Make the module on ``device`` in ``dtype``, buffers included, with the weights of ``init_random_weights``."""
    module = build_component(component, device, dtype)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))  # module.to(dtype) warns about diffusers' float32 modules
    init_random_weights(module, seed)
    return module.eval()


@torch.no_grad()
def init_random_weights(module: nn.Module, seed: int) -> None:
    """Set weights in place from N(0, 1 / inputs) and biases to 0; the weights of norms are unchanged.

    Inputs of independent unit variance then give outputs of unit variance; norms before every matrix product keep it.
    Modulation is a projection of a small embedding, so shifts, scales and gates stay below one.
    """
    parameters = list(module.named_parameters())
    if parameters[0][1].is_meta:
        return
    generator = torch.Generator(parameters[0][1].device).manual_seed(seed)
    for name, parameter in parameters:
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()


def random_row(prompt: str, like: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return random embeddings of one prompt, a function of its text and their names, shaped as ``like``.

    Floating ones are standard normal, others (masks) 1.
    """
    row = {}
    for name, value in like.items():
        if value.is_floating_point():
            identity = hashlib.blake2b(f"{name}/{prompt}".encode(), digest_size=4).digest()
            row[name] = noise(torch.tensor([int.from_bytes(identity, "little")]), tuple(value.shape))[0].to(device)
        else:
            row[name] = torch.ones(value.shape, dtype=value.dtype, device=device)
    return row
