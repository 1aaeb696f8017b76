"""What the three launchers have in common: CPU seconds between marks, counts of the work done, and the reward.

A launcher runs a program in its own process and calls ``mark`` where the program begins to roll out, begins to train,
and ends an iteration. Each mark prints one line of JSON after ``MARK``, which run.py reads.
"""

import json
import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel, SD3Transformer2DModel
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

torch.set_num_threads(1)
work: Counter[str] = Counter()  # since the last mark
shape: dict[str, int] = {}
rewards: list[Tensor] = []  # since the last mark
last = int(os.environ["ITERATIONS"])
begun = 0


def mark(phase: str) -> None:
    """End the phase that runs and begin ``phase``: rollout, train or rest. End the process after ITERATIONS."""
    global begun
    begun += phase == "rollout"
    line: dict[str, Any] = dict(phase=phase, cpu=time.process_time(), work=dict(work))
    if phase == "rest":
        line |= shape | dict(gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    if rewards:
        every = torch.cat(rewards)
        line |= dict(reward=every.mean().item(), reward_std=every.std().item())
    print("\nMARK", json.dumps(line), flush=True)  # progress bars leave their line open
    work.clear()
    rewards.clear()
    if begun > last:
        os._exit(0)


def redness(images: Tensor) -> Tensor:
    """Mean of red less half of green and half of blue [B] of images [B, 3, H, W] in [0, 1]."""
    red, green, blue = images.float().mean((2, 3)).unbind(1)
    rewards.append(red - (green + blue) / 2)
    return rewards[-1]


def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Count the rows of a transformer's calls, with and without gradients, and record the sizes of the first call."""

    @wraps(forward)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        rows = len(kwargs["hidden_states"])
        if torch.is_grad_enabled():
            work["rows with gradients"] += rows
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            shape.setdefault("trained parameters", sum(parameter.numel() for parameter in trained))
            shape.setdefault("training batch", rows)
        else:
            work["rows without gradients"] += rows
        shape.setdefault("text tokens", kwargs["encoder_hidden_states"].shape[1])
        return forward(self, *args, **kwargs)

    return call


def decoded(decode: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(decode)
    def call(self: AutoencoderKL, z: Tensor, *args: Any, **kwargs: Any) -> Any:
        work["images"] += len(z)
        return decode(self, z, *args, **kwargs)

    return call


for transformer in (FluxTransformer2DModel, SD3Transformer2DModel):
    transformer.forward = counted(transformer.forward)
AutoencoderKL.decode = decoded(AutoencoderKL.decode)
register_optimizer_step_post_hook(lambda *_: work.update({"optimiser steps": 1}))
