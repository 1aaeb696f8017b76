"""FP8 and INT8 linear layers: codes bit for bit, products, and accuracy.

The native layers also run on any CPU: PyTorch has the integer product there, conftest replaces the FP8 product.
"""

from importlib.resources import files

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from solrl_lightning.quantization.nvfp4 import round_e4m3
from solrl_lightning.quantization.rowwise import quantize_fp8, quantize_int8
from solrl_lightning.quantization.scaled_linear import (
    EmulatedFP8Linear,
    EmulatedINT8Linear,
    FP8Linear,
    INT8Linear,
    ScaledLinear,
)

F32 = np.float32
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]
)
LAYERS = (EmulatedFP8Linear, FP8Linear, EmulatedINT8Linear, INT8Linear)
layers = pytest.mark.parametrize("layer_cls", LAYERS)


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """Return the nearest number of the table, ties to the even index."""
    magnitude = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(E4M3, magnitude), 1, len(E4M3) - 1)
    middle = (E4M3[above - 1] + E4M3[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    return np.copysign(E4M3[np.where(up, above, above - 1)], x)


def reference(x: Tensor, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Return codes [M, D] and scales [M, 1] by NumPy's FP32 division and the definition of each format."""
    values = x.float().numpy()
    largest = F32(448 if precision == "fp8" else 127)
    scale = np.maximum(np.abs(values).max(-1, keepdims=True), F32(1e-12)) / largest
    scaled = values / scale
    codes = nearest_e4m3(np.clip(scaled, -448, 448)) if precision == "fp8" else np.rint(scaled)
    return codes.astype(np.float64), scale


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(bias: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(128, 48, bias=bias).to(dtype).requires_grad_(False)


INPUTS = {
    "normal": random(64, 96),
    "bf16": random(64, 96).bfloat16(),
    "wide": random(64, 96) * 10 ** -torch.linspace(0, 8, 96),  # down to subnormals and to zero
    "tiny": random(8, 96) * 1e-20,
    "huge": random(8, 96) * 1e30,
    "zero": torch.zeros(4, 96),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(("precision", "dtype"), [("fp8", torch.float8_e4m3fn), ("int8", torch.int8)])
def test_codes_and_scales_match_definition(name: str, precision: str, dtype: torch.dtype) -> None:
    x, quantize = INPUTS[name], {"fp8": quantize_fp8, "int8": quantize_int8}[precision]
    codes, scale = reference(x, precision)
    for value_dtype in (dtype, torch.float32, torch.bfloat16):
        values, result_scale = quantize(x, value_dtype)
        assert values.dtype == value_dtype and np.array_equal(values.double().numpy(), codes)
        assert np.array_equal(result_scale.numpy(), scale)


def test_fp8_codes_match_cast_at_values_and_ties() -> None:
    numbers = torch.from_numpy(E4M3).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
    x = torch.cat([x, -x])
    assert round_e4m3(x).equal(x.to(torch.float8_e4m3fn).float())


@layers
@pytest.mark.parametrize("bias", [True, False])
def test_product_equals_that_of_codes(layer_cls: type[ScaledLinear], bias: bool) -> None:
    layer, x = linear(bias), random(3, 20, 128)
    y = layer_cls(layer)(x)
    precision = "fp8" if "FP8" in layer_cls.__name__ else "int8"
    codes_x, scale_x = reference(x.flatten(0, 1), precision)
    codes_w, scale_w = reference(layer.weight, precision)
    exact = (codes_x @ codes_w.T) * scale_x * scale_w.T
    if bias:
        exact = exact + layer.bias.numpy()
    # FP8 units give BF16, to which the bias is rounded, too.
    error = 2**-7 if layer_cls is FP8Linear else 2**-20
    assert y.dtype == torch.float32 and y.shape == (3, 20, 48)
    torch.testing.assert_close(y.flatten(0, 1).double(), torch.from_numpy(exact), rtol=error, atol=error)


def test_native_and_emulated_int8_are_bit_equal() -> None:
    x = random(40, 128)
    assert INT8Linear(linear())(x).equal(EmulatedINT8Linear(linear())(x))


@layers
def test_bf16_result_is_fp32_result_rounded_once(layer_cls: type[ScaledLinear]) -> None:
    layer, x = layer_cls(linear(dtype=torch.bfloat16)), random(40, 128).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    assert layer(x).equal(layer(x.float()).bfloat16())


@layers
def test_requantize_keeps_buffers_and_bias(layer_cls: type[ScaledLinear]) -> None:
    layer, x, other = layer_cls(linear()), random(40, 128), linear(seed=7)
    before, addresses = layer(x), {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    layer.requantize_(other.weight)
    other.bias = linear().bias
    assert {name: buffer.data_ptr() for name, buffer in layer.named_buffers()} == addresses
    assert layer(x).equal(layer_cls(other)(x)) and not layer(x).equal(before)


@pytest.mark.parametrize(
    ("layer_cls", "shape", "reason"),
    [
        (FP8Linear, (24, 32), "in_features 24 is not a multiple of 16"),
        (FP8Linear, (32, 24), "out_features 24 is not a multiple of 16"),
        (INT8Linear, (32, 20), "out_features 20 is not a multiple of 8"),
        (INT8Linear, (24, 8), ""),
        (EmulatedFP8Linear, (5, 3), ""),
        (EmulatedINT8Linear, (5, 3), ""),
    ],
)
def test_unsupported_shapes_have_a_reason(layer_cls: type[ScaledLinear], shape: tuple[int, int], reason: str) -> None:
    assert layer_cls.unsupported_reason(nn.Linear(*shape)) == reason


@pytest.fixture(scope="module")
def activations() -> list[tuple[nn.Linear, Tensor]]:
    """Return attention and MLP layers of the embedded model with their inputs at a middle noise level."""
    folder = files("solrl_lightning") / "assets" / "tiny" / "transformer"
    model = FluxTransformer2DModel.from_pretrained(str(folder)).requires_grad_(False)
    seen: list[tuple[nn.Linear, Tensor]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "transformer_blocks" in name and "norm" not in name:
            module.register_forward_hook(lambda layer, inputs, output: seen.append((layer, inputs[0])))
    config = model.config
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    model(
        hidden_states=random(4, 16, config.in_channels),
        encoder_hidden_states=random(4, 10, config.joint_attention_dim, seed=1),
        pooled_projections=random(4, config.pooled_projection_dim, seed=2),
        timestep=torch.full((4,), 0.5),
        guidance=torch.ones(4) if config.guidance_embeds else None,
        img_ids=ids,
        txt_ids=torch.zeros(10, 3),
    )
    return seen


@pytest.mark.parametrize(
    ("layer_cls", "mean", "worst"), [(EmulatedFP8Linear, 0.035, 0.045), (EmulatedINT8Linear, 0.01, 0.015)]
)
def test_quantisation_error_of_embedded_model_is_small(
    activations: list[tuple[nn.Linear, Tensor]], layer_cls: type[ScaledLinear], mean: float, worst: float
) -> None:
    errors = []
    for layer, x in activations:
        exact = nn.functional.linear(x, layer.weight)  # the bias is not rounded
        without = nn.Linear(layer.in_features, layer.out_features, bias=False)
        without.weight = layer.weight
        errors.append(((layer_cls(without)(x) - exact).norm() / exact.norm()).item())
    assert len(errors) > 20
    assert 0 < np.mean(errors) < mean and max(errors) < worst
