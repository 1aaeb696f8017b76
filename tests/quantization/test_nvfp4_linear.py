"""The emulated NVFP4 linear layer: values and requantisation in place."""

import weakref

import pytest
import torch
from torch import nn

from solrl_lightning.quantization.cached_quantizer import CachedQuantizer
from solrl_lightning.quantization.nvfp4 import encode, fake_quantize, quantize
from solrl_lightning.quantization.scaled_linear import NVFP4Linear


def linear(bias: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(128, 48, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
def test_product_equals_that_of_dequantised_operands(bias: bool) -> None:
    layer, x = linear(bias), torch.randn(3, 20, 128)
    y = NVFP4Linear(layer)(x)
    exact = encode(x, per_row=True).dequantize(torch.float64) @ quantize(layer.weight).dequantize(torch.float64).T
    if bias:
        exact += layer.bias.double()
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=2**-20, atol=2**-20)  # FP32 accumulation of 128 products


def test_bf16_result_is_fp32_result_rounded_once() -> None:
    layer, x = NVFP4Linear(linear(dtype=torch.bfloat16)), torch.randn(20, 128).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    assert layer(x).equal(layer(x.float()).bfloat16())


def test_operands_are_equal_in_bf16_and_fp32() -> None:
    layer, x = NVFP4Linear(linear()), torch.randn(20, 128)
    expected = layer(x)
    layer.weight_values = layer.weight_values.bfloat16()  # as on a GPU; here the product is rounded to BF16 too
    torch.testing.assert_close(layer(x), expected, rtol=2**-7, atol=2**-7)
    assert layer.weight_values.float().equal(NVFP4Linear(linear()).weight_values.float())


def test_input_changed_in_place_is_quantised_again() -> None:
    first, second, x = (
        NVFP4Linear(linear(seed=1)),
        NVFP4Linear(linear(seed=2)),
        torch.randn(20, 128),
    )
    expected = second(3 * x)
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


def test_cached_input_gives_same_result_as_copy() -> None:
    layers = [NVFP4Linear(linear(seed=seed)) for seed in range(3)]
    x = torch.randn(20, 128)
    for layer in layers:
        assert layer(x).equal(layer(x.clone()))
    with torch.inference_mode():
        assert layers[0](x.clone()).equal(layers[0](x))


def test_requantize_keeps_buffers_and_compiled_code() -> None:
    layer, x = NVFP4Linear(linear()), torch.randn(20, 128)
    graphs = []

    def count_graphs(graph: torch.fx.GraphModule, example_inputs: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=count_graphs, fullgraph=True)
    addresses = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    buffers = dict(layer.named_buffers())
    before = compiled(x)
    other = linear(seed=7)
    layer.requantize_(other.weight)
    other.bias = linear().bias
    after = compiled(x)
    assert {name: buffer.data_ptr() for name, buffer in layer.named_buffers()} == addresses
    assert all(buffer is buffers[name] for name, buffer in layer.named_buffers())
    assert len(graphs) == 1
    assert after.equal(NVFP4Linear(other)(x))
    assert not after.equal(before)
