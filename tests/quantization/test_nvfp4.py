"""NVFP4 bit for bit: against its definition in exact arithmetic, against torchao, and compiled against eager.

The slow reference uses tables of representable numbers and the rule "nearest, ties to the even code", with FP32
operations by NumPy.
"""

import numpy as np
import pytest
import torch
from exact_formats import E2M1, E4M3, F32, nearest_code, random, values_and_ties
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
    return np.stack((packed.numpy() & 0xF, packed.numpy() >> 4), axis=-1).reshape(*packed.shape[:-1], -1)


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
inputs = pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)


@inputs
def test_quantize_matches_definition_bit_for_bit(x: Tensor) -> None:
    ours = quantize(x)
    codes, scales, global_scale = reference(x)
    assert np.array_equal(unpack(ours.packed), codes)
    assert np.array_equal(ours.block_scales.float().numpy(), scales)
    if global_scale > 1e-38:  # smaller tensors are decoded with the inverse of the cut-off encoding scale
        assert ours.global_scale.item() == global_scale
    values = np.where(codes < 8, 1, -1) * E2M1[codes % 8]
    expected = values * np.repeat(scales.astype(np.float64), 16, axis=-1) * ours.global_scale.item()
    # Two roundings to FP32; 2^-149 is the spacing of FP32's subnormals.
    np.testing.assert_allclose(ours.dequantize().double().numpy(), expected, rtol=2**-23, atol=13 * 2.0**-149)
    assert ours.dequantize(torch.bfloat16).equal(ours.dequantize().bfloat16())


def test_ties_of_coarse_data_round_as_in_reference() -> None:
    for amax in range(1, 65):
        x = torch.randint(-8 * amax, 8 * amax + 1, (32, 256), generator=torch.Generator().manual_seed(amax)) / 8.0
        ours, (codes, scales, _) = quantize(x), reference(x)
        assert np.array_equal(ours.block_scales.float().numpy(), scales)
        nonzero = x.numpy() != 0
        assert np.array_equal(unpack(ours.packed)[nonzero], codes[nonzero])


@inputs
def test_fake_quantize_and_rows_equal_values_of_codes(x: Tensor) -> None:
    expected = quantize(x)
    for dtype in (torch.bfloat16, torch.float32):
        values, global_scale = fake_quantize(x, dtype)
        assert values.dtype == dtype and global_scale.equal(expected.global_scale)
        assert values.float().equal(expected._replace(global_scale=torch.tensor(1.0)).dequantize())
    rows, (values, scales) = encode(x, per_row=True), fake_quantize(x, torch.float32, per_row=True)
    assert rows.global_scale.shape == (*x.shape[:-1], 1) == scales.shape
    for index in np.ndindex(*x.shape[:-1]):
        alone, (alone_values, alone_scale) = quantize(x[index]), fake_quantize(x[index], torch.float32)
        assert rows.packed[index].equal(alone.packed)
        assert rows.block_scales[index].float().equal(alone.block_scales.float())
        assert rows.global_scale[index].equal(alone.global_scale[None])
        assert rows.dequantize()[index].equal(alone.dequantize())
        assert values[index].equal(alone_values) and scales[index].equal(alone_scale[None])


def test_round_e4m3_matches_torch_at_values_and_ties() -> None:
    grid = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert np.array_equal(grid.numpy(), E4M3)
    points = torch.cat((values_and_ties(E4M3), torch.rand(10_000) * 2**-5, torch.tensor([2.0**-10])))
    assert round_e4m3(points).equal(points.to(torch.float8_e4m3fn).float())


def test_round_e2m1_is_nearest_even_at_values_and_ties() -> None:
    assert np.array_equal(E2M1_VALUES, E2M1)
    points = values_and_ties(E2M1)
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


def test_codes_and_scales_by_hand() -> None:
    x = torch.cat((torch.full((16,), 2688.0), torch.full((16,), 6 * 2**-9)))  # the least block scale
    assert quantize(x).block_scales.tolist() == [448.0, 2**-9] and quantize(x).dequantize().equal(x)
    ours = quantize(torch.tensor([6.0, -0.5] + 14 * [0.0]))
    assert ours.packed[0].item() == 0x7 | 0x9 << 4  # the even element in the low nibble


def test_float_dtypes_are_quantised_as_fp32() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = random(8, 64).to(dtype)
        for ours, expected in zip(quantize(x), quantize(x.float()), strict=True):
            assert ours.float().equal(expected.float())


@pytest.mark.parametrize("size", [1e-37, 1.0, 1e37])
def test_round_trip_of_gaussian_data_has_20_db_snr(size: float) -> None:
    x = random(512, 512).double() * size
    noise = quantize(x).dequantize(torch.float64) - x
    sqnr = 20 * torch.log10((x / size).norm() / (noise / size).norm()).item()
    assert 20 < sqnr < 21.5, f"{sqnr:.2f} dB"


def test_compiled_matches_eager_bit_for_bit() -> None:
    def of_weights_and_rows(x: Tensor) -> tuple[NVFP4Tensor, tuple[Tensor, Tensor]]:
        return quantize(x), fake_quantize(x, torch.float32, per_row=True)

    compiled = torch.compile(of_weights_and_rows, fullgraph=True, dynamic=False)
    for x in (wide(64), ties(), random(64, 64).clone(), torch.zeros(64, 64)):
        (packed, scales, global_scale), per_row = compiled(x)
        expected, expected_per_row = of_weights_and_rows(x)
        assert packed.equal(expected.packed)
        assert scales.view(torch.uint8).equal(expected.block_scales.view(torch.uint8))
        assert global_scale.equal(expected.global_scale)
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


def test_unsupported_shapes_and_dtypes_raise() -> None:
    for shape in ((4, 24), (), (0, 16), (4, 0)):
        with pytest.raises(ValueError, match="multiple of 16.*pad it"):
            quantize(torch.ones(shape))
    with pytest.raises(ValueError, match="floating-point"):
        quantize(torch.ones(4, 16, dtype=torch.int32))
