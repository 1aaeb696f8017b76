"""The packages that Python finds. Imports no torch: command lines are checked with it."""

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from solrl_lightning.artifacts.formatting import shell_quoted
from solrl_lightning.errors import UserError

_PACKAGES = (
    "torch torchvision lightning diffusers transformers peft torchmetrics tensorboard safetensors datasets pyarrow "
    "open_clip huggingface_hub numpy scipy PIL matplotlib jinja2 tqdm pydantic urllib3 torchao ray mlflow wandb "
    "tokenizers accelerate fastapi uvicorn rapidocr onnxruntime"
).split()


def check_not_hidden() -> None:
    """Raise UserError for what Python would import in place of a package: a file, or a folder of the working directory.

    A package may lie in a folder of PYTHONPATH.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        raise UserError("The working directory was removed. Go to another one with cd <folder>.") from error
    elsewhere = [path for path in sys.path if Path(path).absolute() != here]
    for package in _PACKAGES:
        spec = None if package in sys.modules else find_spec(package)
        if spec is None or spec.origin is None:  # None for a folder without __init__.py
            continue
        place = Path(spec.origin) if spec.submodule_search_locations is None else Path(spec.origin).parent
        if place.is_file() or (place.parent == here and PathFinder.find_spec(package, elsewhere)):
            raise UserError(f"{place} is invalid: Python imports it in place of the package {package}. Rename it.")


def is_installed(package: str) -> bool:
    """Return whether ``package`` is installed; a folder of its name in the working directory is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def check_installed(option: str, *packages: str, of: str = "") -> None:
    """Raise UserError unless the packages that ``option`` needs are installed; ``of`` is the requirement with them."""
    for package in packages:
        if not is_installed(package):
            raise UserError(
                f"{option} is invalid: the package {package} is not installed. Install it with pip install "
                f"{shell_quoted(of or package)}, or leave the option out."
            )
