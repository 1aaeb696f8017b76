"""Rounding by the definition of each format, in NumPy, inputs for it, and the layers that any CPU can run."""

import numpy as np
import torch
from torch import Tensor, nn

from solrl_lightning.quantization.formats import FORMATS
from solrl_lightning.quantization.scaled_linear import ScaledLinear

EMULATED = [each.emulated for each in FORMATS.values()]
LAYERS = [
    layer_cls
    for each in FORMATS.values()
    for layer_cls in (each.emulated, *(native.layer() for native in each.native.values()))
    if issubclass(layer_cls, ScaledLinear)
]
F32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]
)


def nearest_code(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the index of the nearest entry for x >= 0, ties to the even index; float64 makes every sum exact."""
    x = x.astype(np.float64)
    above = np.clip(np.searchsorted(table, x), 1, len(table) - 1)
    middle = (table[above - 1] + table[above]) / 2
    up = (x > middle) | ((x == middle) & (above % 2 == 0))
    return np.where(up, above, above - 1)


def values_and_ties(table: np.ndarray) -> Tensor:
    """Return the numbers of a format, the ties between them, their neighbours in FP32, and all of these negated."""
    grid = torch.from_numpy(table).float()
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2))
    neighbours = [points.nextafter(torch.tensor(end)) for end in (0.0, float(grid[-1]))]
    points = torch.cat((points, *neighbours, torch.rand(10_000) * grid[-1], torch.tensor([1e-45, 1e-38])))
    return torch.cat((points, -points))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(bias: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(128, 48, bias=bias).to(dtype).requires_grad_(False)
