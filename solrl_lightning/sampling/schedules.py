"""Noise levels [T+1] in float32, from 1 (noise) down to 0 (image): uniform (SANA), shifted (SD3), dynamic (FLUX.1)."""

import math

import torch
from torch import Tensor


def uniform_sigmas(steps: int) -> Tensor:
    """[T+1]: 1, 1 - 1/T, ..., 1/T, 0."""
    return shifted_sigmas(steps, shift=1.0)


def shifted_sigmas(steps: int, shift: float) -> Tensor:
    """[T+1]: s t / (1 + (s - 1) t) on the uniform levels t (Esser et al. 2024, equation 23); s > 1 dwells in noise."""
    if steps < 1:
        raise ValueError(f"the number of solver steps must be at least 1; got {steps}")
    if shift <= 0:
        raise ValueError(f"the sigma shift must be positive; got {shift}")
    t = torch.arange(steps, -1, -1, dtype=torch.float64) / steps
    return (shift * t / (1 + (shift - 1) * t)).float()


def flux_sigmas(
    steps: int,
    image_tokens: int,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
) -> Tensor:
    """[T+1]: FLUX's dynamic shift. mu is linear in the number of image tokens and goes through (base_tokens,
    base_shift) and (max_tokens, max_shift); e^mu / (e^mu + 1/t - 1) is the shift above with s = e^mu.

    The defaults are those of diffusers' FluxPipeline; pass the scheduler's own configuration where it has one.
    """
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    mu = base_shift + slope * (image_tokens - base_tokens)
    return shifted_sigmas(steps, math.exp(mu))
