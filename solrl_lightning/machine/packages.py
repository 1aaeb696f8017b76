"""Optional packages. Imports no torch: command lines are checked with it."""

from importlib.util import find_spec

from solrl_lightning.artifacts.formatting import shell_quoted
from solrl_lightning.errors import UserError


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
