"""Models without weights: diffusers and transformers classes with the arguments of their constructors.

They are read from the config files of a pipeline folder. ``assets/architectures`` has the config files of published
pipelines, so plans and timings at real size need no download.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers

from solrl_lightning.errors import UserError
from solrl_lightning.policies.config_files import ARCHITECTURES, INDEX, config_folder
from solrl_lightning.policies.loading import check_class

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
        UserError: there are no config files for ``pretrained`` (without asking the hub), or they describe another
            kind of pipeline.
    """
    folder = config_folder(pretrained)
    if folder is None:
        known = sorted(str(index.parent.relative_to(ARCHITECTURES)) for index in ARCHITECTURES.rglob(INDEX))
        raise UserError(
            f"model.pretrained={pretrained} is invalid: without weights, a model must be a folder with config files or "
            f"one of {', '.join(known)}. Download its config files: hf download {pretrained} --include '*.json' "
            "--local-dir <folder>, and set model.pretrained=<folder>."
        )
    check_class(pipeline_class, pretrained, folder)
    return read_architecture(folder)._replace(name=pretrained)


def read_architecture(folder: Path) -> Architecture:
    """Return the architecture that a diffusers pipeline folder describes in its config files."""
    index = json.loads((folder / INDEX).read_text())
    components = {}
    for name, entry in index.items():
        files = (folder / name / "config.json", folder / name / "scheduler_config.json")
        file = next((file for file in files if file.is_file()), None)
        if file is not None and not name.startswith("tokenizer"):
            library, cls = entry
            components[name] = Component(library, cls, json.loads(file.read_text()))
    return Architecture(str(folder), index["_class_name"], components)


def build_component(component: Component, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the component with the initial weights of its class, created on ``device`` in ``dtype``.

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
