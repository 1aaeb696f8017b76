"""Checkpoints as a training run would leave them."""

from pathlib import Path
from typing import Any

import torch

from solrl_lightning.build import build_model
from solrl_lightning.options.run import Run
from solrl_lightning.tasks.generate import without_training


def write_checkpoint(cfg: Run, path: Path, trained: float = 0.1, average: float = 0.5) -> Path:
    """Write the start with B, and its average, moved by random amounts of these sizes."""
    module = build_model(without_training(cfg), torch.device("cpu"))
    states = {}
    for name, size in (("default", trained), ("ema", average)):
        generator = torch.Generator().manual_seed(len(states))
        states[name] = {key: value.clone() for key, value in module.policy_state("default").items()}
        for key, value in states[name].items():
            if ".lora_B." in key:
                value.normal_(generator=generator).mul_(size)
    for key, value in module.policy_state("default").items():
        value.copy_(states["default"][key])
    state = {"state_dict": module.state_dict(), "global_step": 0}
    checkpoint: dict[str, Any] = state | {"loops": {}, "optimizer_states": []}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint | {"callbacks": {"WeightEMA": {"average": states["ema"]}}}, path)
    return path
