"""Check our calls of cache-dit, and the layout that its packer gives the weights, against its installed Python files.

    python tests/quantization/check_cache_dit.py

The kernels need a GPU. Here functions of tensors replace them below cache-dit's wrappers: they read the packed weight
where the CUDA source (csrc/kernels/svdq at commit f86744a) reads it, and round as it rounds. ``make contract`` runs
this with the oldest supported version and the newest; it is not a pytest test, because tests do not need cache-dit.
"""

from importlib.metadata import version
from typing import Any

import cache_dit.kernels.cuda  # defines the operators
import torch
from cache_dit.kernels.backend import KernelBackend
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.quantization import cache_dit as ours
from solrl_lightning.quantization.formats import INT4
from solrl_lightning.quantization.int4 import GROUP, encode_input, encode_weight
from solrl_lightning.quantization.scaled_linear import EmulatedINT4Linear

ROWS = 256  # a block of the kernels


def unpacked_codes(packed: Tensor) -> Tensor:
    """Return codes [N, D] of a packed weight [N, D / 2], by gemm_base.cuh ``load_wgt`` and PTX's operand B of m16n8k64.

    In tiles of 128 x 64, 16 rows have 16 bytes for each of 32 lanes, which are four registers of 8 codes.
    """
    outputs, inputs = packed.shape[0], 2 * packed.shape[1]
    n, k = torch.arange(outputs)[:, None], torch.arange(inputs)
    tile = n // 128 * (inputs // 64) + k // 64
    lane = n % 8 * 4 + k % 32 // 8
    register = n % 16 // 8 * 2 + k % 64 // 32
    byte = ((tile * 8 + n % 128 // 16) * 32 + lane) * 16 + register * 4 + k % 8 // 2
    nibble = packed.flatten().view(torch.uint8)[byte].int() >> k % 2 * 4 & 0xF
    return nibble - 16 * (nibble > 7).int()


def unpacked_scales(packed: Tensor, outputs: int) -> Tensor:
    """Return scales [N, groups] of packed ones, by gemm_base.cuh ``load_wscale`` and ``broadcast_wscale``."""
    groups = packed.numel() // outputs
    n, group = torch.arange(outputs)[:, None], torch.arange(groups)
    lane, element = n % 128 // 16 * 4 + n % 8 // 2, n % 16 // 8 * 2 + n % 2
    return packed.flatten()[((n // 128 * groups + group) * 32 + lane) * 4 + element]


def quantize(x: Tensor, down: Tensor | None, smooth: Tensor, glu: bool, fp4: bool, padding: int) -> Any:
    """gemm_w4a4.cuh ``quantize_w4a4_fuse_lora_kernel``, with codes and scales as only `product` reads them."""
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and down is None and not glu and not fp4 and padding == ROWS
    assert smooth.dtype == x.dtype and smooth.shape == x.shape[1:] and x.shape[1] % 128 == 0  # the kernel reads it
    codes, scales = encode_input(nn.functional.pad(x / smooth, (0, 0, 0, -len(x) % ROWS)))
    pairs = codes.flatten(1).to(torch.int8).unflatten(1, (-1, 2)) & 0xF
    packed = (pairs[..., 0] + (pairs[..., 1] << 4)).view(torch.uint8)
    return packed, scales[..., 0].t().bfloat16(), x.new_empty(0).float()


def product(act: Tensor, weight: Tensor, ascales: Tensor, wscales: Tensor, *others: Any) -> Tensor:
    """gemm_base.cuh ``apply_scales`` and ``EpilogueBias``: sums of groups are rounded to BF16 and added in BF16."""
    lora, up, bias, fp4, alpha, wcscales, unsigned, dtype = others
    assert lora is None and up is None and wcscales is None and not fp4 and alpha == 1 and not unsigned and dtype == 1
    assert len(act) % ROWS == 0 and len(weight) % 128 == 0 and act.shape[1] % 64 == 0
    nibbles = torch.stack((act & 0xF, act >> 4), -1).flatten(1).int()
    x, w = (codes.float().unflatten(1, (-1, GROUP)) for codes in (nibbles - 16 * (nibbles > 7), unpacked_codes(weight)))
    scale_x, scale_w = ascales.float(), unpacked_scales(wscales, len(weight)).float()
    y = torch.zeros(len(act), len(weight))
    for group in range(x.shape[1]):
        sums = (x[:, group] @ w[:, group].t()).bfloat16().double()
        scale = (scale_x[group, :, None] * scale_w[:, group]).bfloat16().double()
        y = (y.double() + sums * scale).bfloat16()
    return y if bias is None else y + unpacked_scales(bias, len(weight))[:, 0]


def layers(inputs: int, outputs: int, bias: bool = True) -> tuple[nn.Linear, Any, Any]:
    linear = nn.Linear(inputs, outputs, bias=bias).bfloat16().requires_grad_(False)
    return linear, ours.CacheDiTLinear(linear), EmulatedINT4Linear(linear)


def check_layout() -> None:
    for inputs, outputs in ((128, 128), (384, 256)):
        linear, layer, _ = layers(inputs, outputs)
        codes, scales = encode_weight(linear.weight)
        assert unpacked_codes(layer.codes).equal(codes.flatten(1).int())
        assert unpacked_scales(layer.scales, outputs).float().equal(scales[..., 0])
        assert unpacked_scales(layer.bias, outputs)[:, 0].equal(linear.bias)
        other, layer_of_other, _ = layers(inputs, outputs)
        layer.requantize_(other.weight)
        layer.set_bias_(other.bias)
        assert all(map(torch.equal, layer.buffers(), layer_of_other.buffers()))
    print("codes, scales and bias lie where the kernels read them")


def check_extension() -> None:
    """Check that a missing extension is an error that names torch's version, then make cache-dit believe it loaded."""
    assert not ours.is_installed()
    try:
        layers(128, 128)
    except UserError as error:
        assert f"must load with torch {torch.__version__}; it does not (No module named 'cache_dit._C_" in str(error)
    else:
        raise AssertionError("a layer without the extension raises no error")
    cache_dit.kernels.svdq_get_load_error = lambda: None


def check_layer() -> None:
    for shape in ((1, 128), (2, 7, 128), (300, 128)):
        for bias in (True, False):
            _, layer, emulated = layers(128, 256, bias)
            x = torch.randn(*shape)
            y = layer(x)
            assert y.dtype == x.dtype and y.shape == (*shape[:-1], 256)
            torch.testing.assert_close(y, emulated(x.bfloat16()).float(), rtol=2**-6, atol=2**-6)
            torch.testing.assert_close(layer(x.mT.contiguous().mT), y)  # columns lie apart
    compiled = torch.compile(layers(128, 256)[1], backend="eager", fullgraph=True)
    assert compiled(torch.randn(2, 7, 128)).shape == (2, 7, 256)
    print("calls fit, eager and compiled into one graph; numbers are those of the emulation")


def check_tolerance() -> None:
    for inputs in (1024, 3072, 12288):
        linear, layer, emulated = layers(inputs, 128)
        x = torch.randn(256, inputs).bfloat16()
        exact = emulated(x.float())
        error = float((layer(x).float() - exact).abs().max() / exact.abs().max())
        print(f"in_features {inputs}: sums in BF16 differ by {error:.1e} of the largest output")
        assert error < INT4.tolerance


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    KernelBackend.is_supported = lambda name: True  # cache-dit asks for a GPU
    torch.library.impl("cache_dit_cuda_ops::svdq_quantize_w4a4_act_fuse_lora", "CPU")(quantize)
    torch.library.impl("cache_dit_cuda_ops::svdq_gemm_w4a4", "CPU")(product)
    check_extension()
    check_layout()
    check_layer()
    check_tolerance()
    print(f"cache-dit {version('cache-dit')}: the contract holds")


if __name__ == "__main__":
    main()
