"""Noise levels [T+1] in float32 from 1 (noise) to 0 (image), written independently of diffusers' schedulers."""

import math

import torch
from torch import Tensor


def uniform_sigmas(steps: int) -> Tensor:
    """[T+1]: 1, 1 - 1/T, ..., 1/T, 0 (SANA)."""
    return shifted_sigmas(steps, shift=1.0)


def shifted_sigmas(steps: int, shift: float) -> Tensor:
    """[T+1]: s t / (1 + (s - 1) t) of the uniform levels t (SD3; Esser et al. 2024, equation 23)."""
    t = torch.arange(steps, -1, -1, dtype=torch.float64) / steps
    return (shift * t / (1 + (shift - 1) * t)).float()


def flux_sigmas(steps: int, image_tokens: int, base_tokens: int, max_tokens: int) -> Tensor:
    """[T+1]: FLUX's dynamic shift, exp(mu), with mu linear in the tokens: 0.5 at ``base_tokens``, 1.15 at the most."""
    mu = 0.5 + (1.15 - 0.5) / (max_tokens - base_tokens) * (image_tokens - base_tokens)
    return shifted_sigmas(steps, math.exp(mu))
