"""Classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598) of the velocity of any model."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from solrl_lightning.policies.conditioning import Conditioning

Velocity = Callable[[nn.Module, Tensor, Tensor, Conditioning], Tensor]  # transformer, x, sigma, conditioning -> v
Combination = Callable[[Tensor, Tensor, float], Tensor]  # v_cond, v_uncond, scale -> v


def forward_passes(scale: float) -> int:
    """Return the number of forward passes of the transformer per velocity."""
    return 1 if scale == 1 else 2


def extrapolate(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Return v_uncond + scale * (v_cond - v_uncond)."""
    return unconditional + scale * (conditional - unconditional)


def guide(
    velocity: Velocity, unconditional: Conditioning, scale: float, combined: Combination = extrapolate
) -> Velocity:
    """Return the ``combined`` velocity, with v_uncond without gradient; ``velocity`` itself where scale is 1.

    Runs two forward passes of B, not one of 2 B: the batch size of compiled transformers and the memory stay the same,
    and autograd saves nothing of v_uncond. ``unconditional``: embedding of the empty or negative prompt, each [1, ...].
    """
    if scale == 1:
        return velocity

    def guided_velocity(transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        rows = {name: value.expand(len(x), *value.shape[1:]) for name, value in unconditional.items()}
        with torch.no_grad():
            without = velocity(transformer, x, sigma, rows)
        return combined(velocity(transformer, x, sigma, conditioning), without, scale)

    return guided_velocity
