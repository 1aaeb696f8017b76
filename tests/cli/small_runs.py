"""A training run of a second, and the files that it leaves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Command = Callable[..., Any]

SMALL = (
    "experiment=smoke trainer=cpu iterations=2 prompts_per_iteration=1 family.pool=4 family.keep=2 model.full_steps=2 "
    "model.preview_steps=1 model.eval_steps=1 data.eval_prompts=1 data.eval_images=1 evaluation.every=4 "
    "callbacks.rank_correlation.probe_every=0 callbacks.sample_grid.every=0"
).split()


def the_line(err: str) -> str:
    """Return the only error of a terminal without a traceback."""
    assert "Traceback" not in err, err
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    return line


def files_of(folder: Path) -> dict[str, bytes | None]:
    """Return the content of each path below ``folder``; folders and what is no file have None."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def checkpoint(run: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)
