"""Statistics of pictures, on pictures for which they are known."""

import pytest
import torch
from torch import Tensor

from solrl_lightning.metrics.images import STATISTICS, describe, prompt_statistics


def statistics(images: Tensor) -> list[float]:
    """Brightness, saturation, edges and diversity of one prompt's images [n, 3, H, W]."""
    assert STATISTICS == ("brightness", "saturation", "edges", "diversity")
    return prompt_statistics(describe(images)[None])[0].tolist()


def filled(*colours: tuple[float, float, float]) -> Tensor:
    return torch.tensor(colours)[:, :, None, None].expand(-1, 3, 32, 32)


STRIPES = (torch.arange(32) % 2).float().expand(1, 3, 32, 32)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (filled((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), [0.5, 0, 0, 0]),
        (filled((1.0, 0.0, 0.0)), [0.299, 1, 0, 0]),
        (filled((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)), [0.5, 0, 0, 0.5]),
        (STRIPES, [0.5, 0, 0.5, 0]),  # edges: 1 across the stripes, 0 along them
        (STRIPES.mT, [0.5, 0, 0.5, 0]),
    ],
)
def test_statistics_of_known_pictures(images: Tensor, expected: list[float]) -> None:
    assert statistics(images) == pytest.approx(expected, abs=1e-6)


def test_statistics_except_edges_do_not_depend_on_the_resolution() -> None:
    small = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    large = small.repeat_interleave(4, -1).repeat_interleave(4, -2)
    for index in (0, 1, 3):
        assert statistics(large)[index] == pytest.approx(statistics(small)[index], rel=1e-4)
