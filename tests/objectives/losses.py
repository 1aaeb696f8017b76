"""Random inputs of the losses of velocities."""

from typing import Any

import torch
from torch import Tensor


def batch(seed: int = 0, at_old: bool = False, **changes: Any) -> dict[str, Any]:
    """Arguments of a loss for 4 samples; ``at_old`` trains at the old policy's velocity."""
    generator = torch.Generator().manual_seed(seed)
    x0, eps, old, step, step_back = (torch.randn(4, 3, 5, generator=generator) for _ in range(5))
    sigma = torch.rand(4, generator=generator) * 0.9 + 0.05
    level = sigma[:, None, None]
    return {
        "velocity": (old.clone() if at_old else old + 0.3 * step).requires_grad_(),
        "old_velocity": old,
        "reference_velocity": old + 0.2 * step_back,
        "x0": x0,
        "x_t": (1 - level) * x0 + level * eps,
        "sigma": sigma,
        "advantage": torch.tensor([2.0, -1.0, 0.5, -7.0]),
    } | changes


def target(inputs: dict[str, Tensor]) -> Tensor:
    """The velocity eps - x0."""
    return (inputs["x_t"] - inputs["x0"]) / inputs["sigma"][:, None, None]


def gradient(result: Any, inputs: dict[str, Tensor]) -> Tensor:
    return torch.autograd.grad(result.loss, inputs["velocity"])[0]


def double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs in float64, without the history of their gradients."""
    doubles = {name: value.detach().double() for name, value in inputs.items()}
    return doubles | {"velocity": doubles["velocity"].requires_grad_()}
