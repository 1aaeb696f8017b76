"""Statistics of pictures, on pictures for which they are known."""

import pytest
import torch

from solrl_lightning.metrics.images import STATISTICS, describe, prompt_statistics


def statistics(images: torch.Tensor) -> dict[str, float]:
    """Of one prompt's images [n, 3, H, W]."""
    (values,) = prompt_statistics(describe(images)[None])
    return dict(zip(STATISTICS, values.tolist(), strict=True))


def filled(*colours: tuple[float, float, float]) -> torch.Tensor:
    return torch.tensor(colours)[:, :, None, None].expand(-1, 3, 32, 32)


def test_grey_and_red_pictures() -> None:
    grey = statistics(filled((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    assert grey == pytest.approx({"brightness": 0.5, "saturation": 0, "edges": 0, "diversity": 0}, abs=1e-6)
    red = statistics(filled((1.0, 0.0, 0.0)))
    assert red == pytest.approx({"brightness": 0.299, "saturation": 1, "edges": 0, "diversity": 0}, abs=1e-6)


def test_edges_of_stripes_and_diversity_of_black_and_white() -> None:
    stripes = (torch.arange(32) % 2).float().expand(1, 3, 32, 32)
    assert statistics(stripes)["edges"] == pytest.approx(0.5)  # 1 across the stripes, 0 along them
    assert statistics(stripes.mT)["edges"] == pytest.approx(0.5)
    assert statistics(filled((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))["diversity"] == pytest.approx(0.5)


def test_brightness_and_diversity_do_not_depend_on_the_resolution() -> None:
    small = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    large = small.repeat_interleave(4, -1).repeat_interleave(4, -2)
    for name in ("brightness", "saturation", "diversity"):
        assert statistics(large)[name] == pytest.approx(statistics(small)[name], rel=1e-4)
