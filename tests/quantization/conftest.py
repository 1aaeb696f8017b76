"""Fixtures that make arithmetic equal on every CPU and version of torch, for checks to the last bit."""

import pytest
import torch
from torch import Tensor

from solrl_lightning.quantization import scaled_linear


@pytest.fixture(autouse=True)
def fp32_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run emulated products in FP32, as on a CPU without BF16 units; a CPU with them rounds each result to BF16."""
    monkeypatch.setattr(scaled_linear, "has_fast_bf16_products", lambda: False)


@pytest.fixture(autouse=True)
def fp8_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the row-wise FP8 product, which torch 2.11 has for a GPU only."""
    on_a_gpu = scaled_linear.scaled_product

    def product(codes: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        if codes.device.type != "cpu":
            return on_a_gpu(codes, weight, scale, weight_scale, bias)
        y = codes.float() @ weight.float().T * scale * weight_scale
        return (y if bias is None else y + bias).to(torch.bfloat16)

    monkeypatch.setattr(scaled_linear, "scaled_product", product)
