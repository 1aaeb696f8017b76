"""NVFP4 bit for bit: against its definition in exact arithmetic, against torchao, and compiled against eager.

The slow reference uses tables of representable numbers and the rule "nearest, ties to the even code", with FP32
operations by NumPy.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from solrl_lightning.quantization.nvfp4 import (
    E2M1_VALUES,
    NVFP4Tensor,
    encode,
    fake_quantize,
    quantize,
    round_e2m1,
    round_e4m3,
)

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


def reference(x: Tensor) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Return codes [..., D], block scales [..., D/16] and global scale by Transformer Engine's FP32 operations."""
    blocks = x.numpy().reshape(*x.shape[:-1], -1, 16)
    block_amax = np.abs(blocks).max(-1, keepdims=True)
    largest = np.finfo(F32).max
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.minimum(F32(2688) / block_amax.max(), largest)
        exact = np.minimum(block_amax * (encode * (F32(1) / F32(6))), F32(448))
        scales = E4M3[nearest_code(exact, E4M3)].astype(F32)
        factor = np.minimum(F32(1) / (scales * (F32(1) / encode)), largest)
    magnitude = np.abs(np.clip(blocks * factor, F32(-6), F32(6)))
    codes = nearest_code(magnitude, E2M1) + 8 * np.signbit(blocks)
    return codes.reshape(x.shape), scales[..., 0], block_amax.max() / F32(2688)


def unpack(packed: Tensor) -> np.ndarray:
    """Return codes with the even element taken from the low nibble."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=np.int64)
    codes[..., 0::2] = packed.numpy() & 0xF
    codes[..., 1::2] = packed.numpy() >> 4
    return codes


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wide(rows: int = 256, decades: float = 5.0) -> Tensor:
    """Return rows of very different size, so that block scales cover E4M3 down to its subnormals and zero."""
    return random(rows, 64) * 10 ** -torch.linspace(0, decades, rows).unsqueeze(1)


def ties(seed: int = 0) -> Tensor:
    """Return multiples of 1/4 with block maxima of 6 and tensor maximum 2688: scales are exact, many codes are ties."""
    x = torch.randint(-24, 25, (64, 64), generator=torch.Generator().manual_seed(seed)) / 4.0
    x[:, ::16] = 6.0
    x[0] *= 448
    return x


INPUTS = {
    "gaussian": random(64, 256),
    "bfloat16 gaussian": random(64, 256).bfloat16().float(),
    "rows of different size": wide(),
    "ties": ties(),
    "one row of one block": random(16),
    "three dimensions": random(3, 5, 32),
    "tiny": random(8, 32) * 1e-36,
    "subnormal": random(8, 32) * 1e-39,
    "huge": random(8, 32) * 5e37,
    "zeros and signed zeros": torch.tensor([0.0, -0.0]).repeat(4, 16),
    "a zero block": random(4, 32) * torch.tensor([0.0, 1.0]).repeat_interleave(16),
    "a single outlier": torch.eye(32) * 1e4 + random(32, 32) * 1e-3,
}


@pytest.mark.parametrize("name", INPUTS)
def test_quantize_matches_definition_bit_for_bit(name: str) -> None:
    x = INPUTS[name]
    ours = quantize(x)
    codes, scales, global_scale = reference(x)
    assert np.array_equal(unpack(ours.packed), codes)
    assert np.array_equal(ours.block_scales.float().numpy(), scales)
    if global_scale > 1e-38:  # smaller tensors are decoded with the inverse of the cut-off encoding scale
        assert ours.global_scale.item() == global_scale


@pytest.mark.parametrize("amax", range(1, 65))
def test_ties_of_coarse_data_round_as_in_reference(amax: int) -> None:
    x = torch.randint(-8 * amax, 8 * amax + 1, (32, 256), generator=torch.Generator().manual_seed(amax)) / 8.0
    ours, (codes, scales, _) = quantize(x), reference(x)
    assert np.array_equal(ours.block_scales.float().numpy(), scales)
    nonzero = x.numpy() != 0
    assert np.array_equal(unpack(ours.packed)[nonzero], codes[nonzero])


@pytest.mark.parametrize("size", [1e-37, 1e-20, 1.0, 1e20, 1e37])
def test_dequantised_tensor_has_magnitude_of_input(size: float) -> None:
    x = random(16, 64).double() * size
    noise = quantize(x).dequantize(torch.float64) - x
    assert noise.norm() < 0.12 * x.norm()


@pytest.mark.parametrize("name", INPUTS)
def test_dequantize_multiplies_the_three_factors(name: str) -> None:
    ours = quantize(INPUTS[name])
    codes, scales = unpack(ours.packed), ours.block_scales.double().numpy()
    values = np.where(codes < 8, 1, -1) * E2M1[codes % 8]
    expected = values * np.repeat(scales, 16, axis=-1) * ours.global_scale.item()
    # Two roundings to FP32; 2^-149 is the spacing of FP32's subnormals.
    np.testing.assert_allclose(ours.dequantize().double().numpy(), expected, rtol=2**-23, atol=13 * 2.0**-149)
    assert ours.dequantize(torch.bfloat16).equal(ours.dequantize().bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", INPUTS)
def test_fake_quantize_equals_values_of_codes(name: str, dtype: torch.dtype) -> None:
    ours = quantize(INPUTS[name])
    values, global_scale = fake_quantize(INPUTS[name], dtype)
    assert values.dtype == dtype
    assert values.float().equal(ours._replace(global_scale=torch.tensor(1.0)).dequantize())
    assert global_scale.equal(ours.global_scale)


@pytest.mark.parametrize("name", INPUTS)
def test_per_row_quantises_each_row_independently(name: str) -> None:
    x = INPUTS[name]
    ours, (values, scales) = encode(x, per_row=True), fake_quantize(x, torch.float32, per_row=True)
    assert ours.global_scale.shape == (*x.shape[:-1], 1) == scales.shape
    for index in np.ndindex(*x.shape[:-1]):
        alone, (alone_values, alone_scale) = quantize(x[index]), fake_quantize(x[index], torch.float32)
        assert ours.packed[index].equal(alone.packed)
        assert ours.block_scales[index].float().equal(alone.block_scales.float())
        assert ours.global_scale[index].equal(alone.global_scale[None])
        assert ours.dequantize()[index].equal(alone.dequantize())
        assert values[index].equal(alone_values) and scales[index].equal(alone_scale[None])


def test_round_e4m3_matches_torch_at_values_and_ties() -> None:
    grid = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert np.array_equal(grid.numpy(), E4M3)
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2))
    points = torch.cat(
        (points, *(points.nextafter(torch.tensor(end)) for end in (0.0, 448.0)), torch.rand(10_000) * 448)
    )
    points = torch.cat((points, torch.rand(10_000) * 2**-5, torch.tensor([1e-45, 1e-38, 2.0**-10])))
    assert round_e4m3(points).equal(points.to(torch.float8_e4m3fn).float())


def test_round_e2m1_is_nearest_even_at_values_and_ties() -> None:
    grid = torch.tensor(E2M1_VALUES)
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2))
    points = torch.cat((points, *(points.nextafter(torch.tensor(end)) for end in (0.0, 6.0)), torch.rand(10_000) * 6))
    points = torch.cat((points, -points, torch.tensor([1e-45, -1e-45])))
    expected = E2M1[nearest_code(points.abs().numpy(), E2M1)] * points.sign().numpy()
    assert np.array_equal(round_e2m1(points.clone()).numpy(), expected)


def test_quantize_matches_torchao_bit_for_bit() -> None:
    """torchao raises block scales below 2^-6 to that and turns a zero tensor into NaN, so neither is compared.

    torchao's order of FP32 operations may round exact ties differently; they do not occur in this data.
    """
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor as Theirs
    from torchao.prototype.mx_formats.nvfp4_tensor import per_tensor_amax_to_scale

    x = torch.cat([random(128, 256, seed=seed) * 10.0**seed for seed in range(-1, 2)])
    ours = quantize(x)
    theirs = Theirs.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax()))
    assert ours.block_scales.float().min() > 2**-6
    assert ours.global_scale.equal(theirs.per_tensor_scale)
    assert ours.block_scales.view(torch.uint8).equal(theirs.scale.view(torch.uint8))
    assert ours.packed.equal(theirs.qdata)
    assert ours.dequantize().equal(theirs.dequantize(torch.float32))


def test_subnormal_block_scales_are_kept() -> None:
    x = torch.cat((torch.full((16,), 2688.0), torch.full((16,), 6 * 2**-9)))
    ours = quantize(x)
    assert ours.block_scales.tolist() == [448.0, 2**-9]
    assert ours.dequantize().equal(x)


def test_zeros_stay_zeros() -> None:
    zeros = quantize(torch.zeros(4, 32))
    assert not zeros.packed.any() and not zeros.block_scales.float().any() and not zeros.dequantize().any()
    assert not fake_quantize(torch.zeros(4, 32), torch.float32)[0].any()
    one_zero_block = quantize(INPUTS["a zero block"])
    assert not one_zero_block.dequantize()[:, :16].any() and one_zero_block.dequantize()[:, 16:].any()


def test_even_element_is_in_low_nibble() -> None:
    ours = quantize(torch.tensor([6.0, -0.5] + 14 * [0.0]))
    assert ours.packed[0].item() == 0x7 | 0x9 << 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_float_dtypes_are_quantised_as_fp32(dtype: torch.dtype) -> None:
    x = random(8, 64).to(dtype)
    for ours, expected in zip(quantize(x), quantize(x.float()), strict=True):
        assert ours.float().equal(expected.float())


def test_round_trip_of_gaussian_data_has_20_db_snr() -> None:
    x = random(512, 512)
    noise = quantize(x).dequantize() - x
    sqnr = 10 * torch.log10(x.square().sum() / noise.square().sum()).item()
    assert 20 < sqnr < 21.5, f"{sqnr:.2f} dB"


def test_quantize_is_idempotent() -> None:
    once = quantize(random(64, 64)).dequantize()
    assert quantize(once).dequantize().allclose(once, rtol=2**-22, atol=0)


def test_compiled_matches_eager_bit_for_bit() -> None:
    def all_three(x: Tensor) -> tuple[NVFP4Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return quantize(x), fake_quantize(x, torch.float32), fake_quantize(x, torch.float32, per_row=True)

    compiled = torch.compile(all_three, fullgraph=True, dynamic=False)
    for x in (wide(64), ties(), random(64, 64).clone(), torch.zeros(64, 64)):
        (packed, scales, global_scale), (values, _), per_row = compiled(x)
        expected, (expected_values, _), expected_per_row = all_three(x)
        assert packed.equal(expected.packed)
        assert scales.view(torch.uint8).equal(expected.block_scales.view(torch.uint8))
        assert global_scale.equal(expected.global_scale)
        assert values.equal(expected_values)
        assert all(one.equal(other) for one, other in zip(per_row, expected_per_row, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_input_raises_in_quantize_and_gives_nan_in_fake_quantize(bad: float) -> None:
    x = random(4, 32)
    x[1, 3] = bad
    with pytest.raises(ValueError, match="1 non-finite"):
        quantize(x)
    for dtype in (torch.float32, torch.bfloat16):
        assert fake_quantize(x.to(dtype), torch.float32)[0].isnan().all()
        per_row, _ = fake_quantize(x.to(dtype), torch.float32, per_row=True)
        assert per_row.isnan().all(-1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("x", [torch.ones(4, 24), torch.ones(()), torch.ones(0, 16), torch.ones(4, 0)])
def test_last_dimension_not_multiple_of_16_raises(x: Tensor) -> None:
    with pytest.raises(ValueError, match="multiple of 16.*Pad it"):
        quantize(x)


def test_integer_tensor_raises() -> None:
    with pytest.raises(ValueError, match="floating-point"):
        quantize(torch.ones(4, 16, dtype=torch.int32))
