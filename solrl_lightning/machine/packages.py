"""Optional packages. Imports no torch: command lines are checked with it."""

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Return whether ``package`` is installed; a folder of its name in the working directory is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
