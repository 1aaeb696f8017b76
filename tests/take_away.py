"""Each file of a folder taken away, one at a time: an error of one line that names it, or equal outputs."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from solrl_lightning.errors import UserError


def take_each_file_away(folder: Path, outputs_of: Callable[[], Sequence[Tensor]], leave: str = "") -> dict[str, bool]:
    """Return whether each file of ``folder``, but those that end with ``leave``, is needed, by its path there."""
    whole, needed = outputs_of(), {}
    for file in sorted(
        path for path in folder.rglob("*") if path.is_file() and not (leave and path.match(f"*{leave}"))
    ):
        name, aside = str(file.relative_to(folder)), folder.with_name(f"{folder.name}.aside")
        file.rename(aside)
        try:
            outputs = outputs_of()
            assert all(torch.equal(*pair) for pair in zip(whole, outputs, strict=True)), f"without {name}"
            needed[name] = False
        except UserError as error:
            assert file.name in str(error) and "\n" not in str(error), f"without {name}: {error}"
            needed[name] = True
        finally:
            aside.rename(file)
    return needed
