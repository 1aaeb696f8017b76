"""The explorers' cluster, as far as it starts none; driver.py has the rest."""

import pytest
import torch

from solrl_lightning.explorers.cluster import _other_gpus


@pytest.mark.parametrize(
    ("visible", "device", "others"),
    [
        (None, "cuda:1", ["0", "2", "3"]),
        ("4,6,GPU-5ebe9f43", "cuda:1", ["4", "GPU-5ebe9f43"]),  # the run's device is the second of those
        ("2", "cuda:0", []),
        ("", "cpu", []),
        (None, "cpu", ["0", "1", "2", "3"]),
    ],
)
def test_gpu_of_the_run_is_not_the_explorers(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, others: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _other_gpus(torch.device(device)) == others
