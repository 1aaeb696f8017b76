"""NVlabs DiffusionNFT with marks on a CPU: ``python run_diffusion_nft.py CHECKOUT --config CONFIG.py``.

Its script is written for CUDA; ``CPU`` has every replacement in its text, each with the number of its occurrences.
"""

import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from measure import mark, redness
from torch import Tensor

CPU = [
    ('"nccl"', '"gloo"', 1),
    ("torch.cuda.set_device(lock_rank)", "pass", 1),
    ('f"cuda:{local_rank}"', '"cpu"', 1),
    ("device_ids=[local_rank], output_device=local_rank, ", "", 1),
    ("from torch.cuda.amp import GradScaler, autocast as torch_autocast", "from launcher import *", 1),
    ("pin_memory=True", "pin_memory=False", 2),
    ("img_data.numpy()", "img_data.float().numpy()", 1),  # NumPy has no BF16
    ("r=32, lora_alpha=64", "r=8, lora_alpha=16", 1),  # not for the CPU: no option sets the rank
]


def red() -> Any:
    def score(images: Tensor, prompts: list[str], metadata: Any) -> tuple[np.ndarray, dict]:
        return redness(images).numpy(), {}

    return score


if __name__ == "__main__":
    checkout = Path(sys.argv.pop(1))
    sys.path.insert(0, str(checkout))
    sys.modules["wandb"] = MagicMock()  # no account
    launcher = types.ModuleType("launcher")
    launcher.GradScaler = lambda enabled: torch.amp.GradScaler("cpu", enabled=enabled)
    launcher.torch_autocast = lambda enabled, dtype: torch.autocast("cpu", enabled=enabled, dtype=dtype)
    sys.modules["launcher"] = launcher
    os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import flow_grpo.rewards

    flow_grpo.rewards.jpeg_compressibility = red  # the script chooses rewards from a fixed list of names

    script = checkout / "scripts" / "train_nft_sd3.py"
    source = script.read_text()
    for old, new, times in CPU:
        assert source.count(old) == times, f"{script} has {source.count(old)} times {old!r}"
        source = source.replace(old, new)
    program: dict[str, Any] = dict(__name__="train_nft_sd3", __file__=str(script))
    exec(compile(source, script, "exec"), program)

    parallel, sampler, decay = program["DDP"], program["DistributedKRepeatSampler"], program["return_decay"]
    phase = "rest"

    def enter(new: str) -> None:
        global phase
        if phase != new:
            phase = new
            mark(new)

    class MarkedParallel(parallel):
        def train(self, mode: bool = True) -> Any:
            if mode:
                enter("train")
            return super().train(mode)

    class MarkedSampler(sampler):
        def set_epoch(self, epoch: int) -> None:
            enter("rollout")
            super().set_epoch(epoch)

    def marked_decay(*args: Any) -> float:
        enter("rest")  # the old policy's average, as in run_flow_factory.py
        return decay(*args)

    program |= dict(DDP=MarkedParallel, DistributedKRepeatSampler=MarkedSampler, return_decay=marked_decay)
    program["app"].run(program["main"])
