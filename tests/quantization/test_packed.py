"""Packed NVFP4 by PyTorch's block-scaled product: everything except the product, which needs a Blackwell GPU."""

import pytest
import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats.utils import to_blocked

from solrl_lightning.quantization import packed
from solrl_lightning.quantization.nvfp4 import NVFP4Tensor, quantize
from solrl_lightning.quantization.packed import PackedNVFP4Linear, swizzle
from solrl_lightning.quantization.scaled_linear import NVFP4Linear


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(seed: int = 0, bias: bool = True) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(128, 48, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (1, 1), (48, 8), (200, 6), (130, 5)])
def test_swizzle_matches_torchao(shape: tuple[int, int]) -> None:
    scales = random(*shape).to(torch.float8_e4m3fn)
    assert swizzle(scales).view(torch.uint8).equal(to_blocked(scales.view(torch.uint8)))


def unswizzled(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Return the inverse of ``swizzle``, by the cuBLAS manual's formula for the index of scale (row, column)."""
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    tile = (r // 128) * -(-columns // 4) + c // 4
    return flat.float()[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4].to(flat.dtype)


def product(x: NVFP4Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the product of e2m1 * block_scale of both operands, as the hardware computes it."""
    one = torch.ones(())
    assert x.global_scale.shape == (len(x.packed), 1)  # of each row
    weight = NVFP4Tensor(codes, unswizzled(scales, len(codes), codes.shape[1] // 8), one)
    return x._replace(global_scale=one).dequantize() @ weight.dequantize().T


@pytest.mark.parametrize("bias", [True, False])
def test_packed_layer_equals_emulation_up_to_product(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    monkeypatch.setattr(packed, "scaled_product", product)
    layer, other, x = PackedNVFP4Linear(linear(bias=bias)), linear(seed=7, bias=bias), random(2, 20, 128)
    error = {"rtol": 2**-20, "atol": 2**-20}
    torch.testing.assert_close(layer(x), NVFP4Linear(linear(bias=bias))(x), **error)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    addresses = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    layer.requantize_(other.weight)
    other.bias = linear(bias=bias).bias
    assert {name: buffer.data_ptr() for name, buffer in layer.named_buffers()} == addresses
    torch.testing.assert_close(layer(x), NVFP4Linear(other)(x), **error)


def test_packed_layer_holds_codes_and_scales_of_quantize() -> None:
    layer, expected = PackedNVFP4Linear(linear()), quantize(linear().weight)
    assert layer.packed.equal(expected.packed) and layer.weight_scale.equal(expected.global_scale)
    assert unswizzled(layer.block_scales, 48, 8).float().equal(expected.block_scales.float())
