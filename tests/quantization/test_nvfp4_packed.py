"""Packed NVFP4 by PyTorch's block-scaled product: everything except the product, which needs a Blackwell GPU."""

import os
import subprocess
import sys

import pytest
import torch
from exact_formats import linear, random
from torch import Tensor
from torchao.prototype.mx_formats.utils import to_blocked

from solrl_lightning.quantization import nvfp4_packed
from solrl_lightning.quantization.nvfp4 import NVFP4Tensor, quantize
from solrl_lightning.quantization.nvfp4_packed import PackedNVFP4Linear, swizzle
from solrl_lightning.quantization.scaled_linear import NVFP4Linear


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (1, 1), (48, 8), (130, 5)])
def test_swizzle_matches_torchao(shape: tuple[int, int]) -> None:
    scales = random(*shape).to(torch.float8_e4m3fn)
    assert swizzle(scales).view(torch.uint8).equal(to_blocked(scales.view(torch.uint8)))


def unswizzled(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Return the inverse of ``swizzle``, by the cuBLAS manual's formula for the index of scale (row, column)."""
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    tile = (r // 128) * -(-columns // 4) + c // 4
    return flat.float()[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4].to(flat.dtype)


def product(x: Tensor, scales: Tensor, codes: Tensor, weight_scales: Tensor) -> Tensor:
    """Return the product of e2m1 * block_scale of both operands, as the hardware computes it before it rounds."""
    columns, one = codes.shape[1] // 8, torch.ones(())
    operand = NVFP4Tensor(x, unswizzled(scales, len(x), columns), one)
    weight = NVFP4Tensor(codes, unswizzled(weight_scales, len(codes), columns), one)
    return operand.dequantize() @ weight.dequantize().T


@pytest.mark.parametrize("bias", [True, False])
def test_packed_layer_equals_emulation_up_to_product(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    monkeypatch.setattr(nvfp4_packed, "scaled_product", product)
    layer, other, x = PackedNVFP4Linear(linear(bias)), linear(bias, seed=7), random(2, 20, 128)
    codes = quantize(linear(bias).weight)
    assert layer.packed.equal(codes.packed) and layer.weight_scale.equal(codes.global_scale)
    assert unswizzled(layer.block_scales, 48, 8).float().equal(codes.block_scales.float())
    error = {"rtol": 2**-20, "atol": 2**-20}
    torch.testing.assert_close(layer(x), NVFP4Linear(linear(bias))(x), **error)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    addresses = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    layer.requantize_(other.weight)
    other.bias = linear(bias).bias
    assert {name: buffer.data_ptr() for name, buffer in layer.named_buffers()} == addresses
    torch.testing.assert_close(layer(x), NVFP4Linear(other)(x), **error)


INTERPRETED = """
import torch
torch.library.wrap_triton = lambda kernel: kernel  # of torch 2.11 refuses a kernel that is interpreted
from solrl_lightning.quantization.nvfp4_kernel import encode_rows
from solrl_lightning.quantization.nvfp4_packed import encode_rows as expected

torch.manual_seed(0)
ties = torch.tensor([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -2.5, -5.0, -6.0])
blocks = ties * torch.tensor([[0.0], [1.0], [1e-3], [1e-6], [1e-30], [448.0]])  # of a row, down to scales of zero
row = blocks.flatten()
gaussian = (torch.randn(130, 96) * torch.logspace(-30, 30, 130).unsqueeze(1)).bfloat16().float()
x = torch.cat((gaussian, row[None], row.flip(0)[None], torch.zeros(1, 96)))
for mine, other in zip(encode_rows(x), expected(x), strict=True):
    assert mine.dtype == other.dtype and mine.shape == other.shape, (mine.dtype, mine.shape, other.shape)
    assert mine.view(torch.uint8).equal(other.view(torch.uint8))
x = torch.randn(2, 32).bfloat16()
x[1, 3] = float("nan")
(codes, _, row_scales), (expected_codes, _, expected_scales) = encode_rows(x), expected(x)
assert codes[0].equal(expected_codes[0]) and row_scales[0].equal(expected_scales[0])
assert row_scales.isnan().tolist() == [[False], [True]]
"""


def test_kernel_matches_reference_bit_for_bit() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", INTERPRETED], env=environment, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
