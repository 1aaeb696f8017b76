"""Emulated and native linear layers of every format: codes bit for bit, products, requantisation, and accuracy.

The native layers run on any CPU: PyTorch has the integer product there, conftest replaces the FP8 product.
"""

import weakref
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from exact_formats import E4M3, F32, LAYERS, linear, nearest_code, random
from torch import Tensor, nn

from solrl_lightning.quantization.nvfp4 import encode, fake_quantize, quantize
from solrl_lightning.quantization.rowwise import quantize_fp8, quantize_int8
from solrl_lightning.quantization.scaled_linear import (
    CachedQuantizer,
    EmulatedFP8Linear,
    EmulatedINT8Linear,
    FP8Linear,
    INT8Linear,
    NVFP4Linear,
)
from solrl_lightning.quantization.transformer_engine import TransformerEngineLinear

layers = pytest.mark.parametrize("layer_cls", LAYERS)


def reference(x: Tensor, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Return codes [M, D] and scales [M, 1] by NumPy's FP32 division and the definition of each format."""
    values = x.float().numpy()
    largest = F32(448 if precision == "fp8" else 127)
    scale = np.maximum(np.abs(values).max(-1, keepdims=True), F32(1e-12)) / largest
    if precision == "int8":
        return np.rint(values / scale).astype(np.float64), scale
    magnitude = np.minimum(np.abs(values / scale), 448)
    return np.copysign(E4M3[nearest_code(magnitude, E4M3)], values), scale


INPUTS = {
    "normal": random(64, 96),
    "bf16": random(64, 96).bfloat16(),
    "wide": random(64, 96) * 10 ** -torch.linspace(0, 8, 96),  # down to subnormals and to zero
    "tiny": random(8, 96) * 1e-20,
    "huge": random(8, 96) * 1e30,
    "zero": torch.zeros(4, 96),
}


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize(("precision", "dtype"), [("fp8", torch.float8_e4m3fn), ("int8", torch.int8)])
def test_rowwise_codes_and_scales_match_definition(x: Tensor, precision: str, dtype: torch.dtype) -> None:
    quantize = {"fp8": quantize_fp8, "int8": quantize_int8}[precision]
    codes, scale = reference(x, precision)
    for value_dtype in (dtype, torch.float32, torch.bfloat16):
        values, result_scale = quantize(x, value_dtype)
        assert values.dtype == value_dtype and np.array_equal(values.double().numpy(), codes)
        assert np.array_equal(result_scale.numpy(), scale)


@layers
@pytest.mark.parametrize("bias", [True, False])
def test_product_equals_that_of_dequantised_operands(layer_cls: Any, bias: bool) -> None:
    layer, x = linear(bias), random(3, 20, 128)
    y = layer_cls(layer)(x)
    if layer_cls is NVFP4Linear:
        exact = encode(x, per_row=True).dequantize(torch.float64) @ quantize(layer.weight).dequantize(torch.float64).T
    else:
        fp8, int8 = dict.fromkeys((FP8Linear, EmulatedFP8Linear), "fp8"), (INT8Linear, EmulatedINT8Linear)
        precision = (fp8 | dict.fromkeys(int8, "int8"))[layer_cls]
        (codes_x, scale_x), (codes_w, scale_w) = (reference(operand, precision) for operand in (x, layer.weight))
        exact = torch.from_numpy((codes_x @ codes_w.T) * scale_x * scale_w.T)
    if bias:
        exact += layer.bias
    # FP32 sums of 128 products; FP8 units give BF16, to which the bias is rounded, too.
    error = 2**-7 if layer_cls is FP8Linear else 2**-20
    assert y.dtype == torch.float32 and y.shape == (3, 20, 48)
    torch.testing.assert_close(y.double(), exact, rtol=error, atol=error)


def test_native_and_emulated_int8_are_bit_equal() -> None:
    x = random(40, 128)
    assert INT8Linear(linear())(x).equal(EmulatedINT8Linear(linear())(x))


@layers
def test_bf16_result_is_fp32_result_rounded_once(layer_cls: Any) -> None:
    layer, x = layer_cls(linear(dtype=torch.bfloat16)), random(40, 128).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    assert layer(x).equal(layer(x.float()).bfloat16())


def test_operands_are_equal_in_bf16_and_fp32() -> None:
    layer, x = NVFP4Linear(linear()), random(20, 128)
    expected = layer(x)
    layer.weight_values = layer.weight_values.bfloat16()  # as on a GPU; here the product is rounded to BF16 too
    torch.testing.assert_close(layer(x), expected, rtol=2**-7, atol=2**-7)
    assert layer.weight_values.float().equal(NVFP4Linear(linear()).weight_values.float())


@layers
def test_requantize_keeps_buffers_and_bias(layer_cls: Any) -> None:
    layer, x, other = layer_cls(linear()), random(40, 128), linear(seed=7)
    before, addresses = layer(x), {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    layer.requantize_(other.weight)
    other.bias = linear().bias
    assert {name: buffer.data_ptr() for name, buffer in layer.named_buffers()} == addresses
    assert layer(x).equal(layer_cls(other)(x)) and not layer(x).equal(before)


def test_cached_input_is_quantised_again_when_it_changes() -> None:
    first, second = (NVFP4Linear(linear(seed=seed)) for seed in (1, 2))
    x = random(20, 128)
    expected = second(3 * x)
    assert first(x).equal(first(x.clone())) and second(x).equal(second(x.clone()))
    with torch.inference_mode():
        assert first(x.clone()).equal(first(x))
    first(x)
    x.mul_(3)
    assert second(x).equal(expected)


def test_cache_keeps_neither_input_nor_codes_alive() -> None:
    quantized, x, other = CachedQuantizer(fake_quantize), torch.randn(20, 128), torch.randn(20, 128)
    first = weakref.ref(quantized(x, torch.float32)[0])
    assert quantized(x, torch.float32)[0] is first()
    second = weakref.ref(quantized(other, torch.float32)[0])
    assert first() is None
    del x
    assert second() is not None  # the last input lives
    gone = weakref.ref(other)
    del other
    assert gone() is None and second() is None


@pytest.mark.parametrize(
    ("layer_cls", "shape", "reason"),
    [
        (FP8Linear, (24, 32), "in_features 24 is not a multiple of 16"),
        (FP8Linear, (32, 24), "out_features 24 is not a multiple of 16"),
        (INT8Linear, (32, 20), "out_features 20 is not a multiple of 8"),
        (INT8Linear, (24, 8), ""),
        (TransformerEngineLinear, (24, 32), "in_features 24 is not a multiple of 16"),
        (TransformerEngineLinear, (32, 24), "out_features 24 is not a multiple of 16"),
        (EmulatedFP8Linear, (5, 3), ""),
    ],
)
def test_unsupported_shapes_have_a_reason(layer_cls: Any, shape: tuple[int, int], reason: str) -> None:
    assert layer_cls.unsupported_reason(nn.Linear(*shape)) == reason


@pytest.fixture(scope="module")
def activations() -> list[tuple[nn.Linear, Tensor]]:
    """Return attention and MLP layers of the embedded model with their inputs at a middle noise level."""
    folder = files("solrl_lightning") / "assets" / "tiny" / "transformer"
    model = FluxTransformer2DModel.from_pretrained(str(folder)).requires_grad_(False)
    pairs: list[tuple[nn.Linear, Tensor]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "transformer_blocks" in name and "norm" not in name:
            module.register_forward_hook(lambda layer, inputs, output: pairs.append((layer, inputs[0])))
    config, row = model.config, torch.arange(16)
    model(
        hidden_states=random(4, 16, config.in_channels),
        encoder_hidden_states=random(4, 10, config.joint_attention_dim, seed=1),
        pooled_projections=random(4, config.pooled_projection_dim, seed=2),
        timestep=torch.full((4,), 0.5),
        guidance=torch.ones(4) if config.guidance_embeds else None,
        img_ids=torch.stack((0 * row, row // 4, row % 4), dim=1).float(),
        txt_ids=torch.zeros(10, 3),
    )
    return pairs


@pytest.mark.parametrize(
    ("layer_cls", "mean", "worst"), [(EmulatedFP8Linear, 0.035, 0.045), (EmulatedINT8Linear, 0.01, 0.015)]
)
def test_quantisation_error_of_embedded_model_is_small(
    activations: list[tuple[nn.Linear, Tensor]], layer_cls: Any, mean: float, worst: float
) -> None:
    errors = []
    for layer, x in activations:
        exact = nn.functional.linear(x, layer.weight)  # the bias is not rounded
        without = nn.Linear(layer.in_features, layer.out_features, bias=False)
        without.weight = layer.weight
        errors.append(((layer_cls(without)(x) - exact).norm() / exact.norm()).item())
    assert len(errors) > 20
    assert 0 < np.mean(errors) < mean and max(errors) < worst
