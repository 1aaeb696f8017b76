"""Frozen weights stored in 8 or 4 bits by torchao, as in QLoRA (Dettmers et al. 2023, arXiv 2305.14314).

Only storage changes: every product reads the weight dequantised to the dtype of the layer. The policy and its reference
share the stored weights. The merged replica owns its adapted layers in BF16 (stored weight plus LoRA, one rounding) and
the shadow its quantised ones, from the same sums; all other layers share the stored weights.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solrl_lightning.errors import UserError
from solrl_lightning.machine.packages import check_installed
from solrl_lightning.policies.bf16 import has_fast_bf16_products

_NF4_MULTIPLE = 64 * 256
"""Number of weights in an NF4 group: 256 blocks of 64, whose scales share one second-level scale."""


def block_linears(transformer: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks by name: all but embedders, output projection and convolutions."""
    return {
        f"{name}.{inner}": layer
        for name, child in transformer.named_children()
        if isinstance(child, nn.ModuleList)
        for inner, layer in child.named_modules()
        if isinstance(layer, nn.Linear)
    }


def check_storage(storage: str) -> None:
    """Raise ``UserError`` if ``storage`` needs torchao and it is not installed."""
    if storage != "bfloat16":
        check_installed(f"base_weights={storage}", "torchao")


def store_weights(transformer: nn.Module, storage: str, device: torch.device) -> None:
    """Store the weights of `block_linears` on ``device``, layer by layer and in place."""
    check_storage(storage)
    if storage == "bfloat16":
        return
    from torchao import quantization  # takes a second to import

    widened = device.type == "cpu" and not has_fast_bf16_products()
    for name, layer in block_linears(transformer).items():
        if storage == "nf4" and layer.weight.numel() % _NF4_MULTIPLE:
            raise UserError(
                f"base_weights=nf4 is invalid: every layer of the blocks must have a multiple of {_NF4_MULTIPLE} "
                f"weights; {name} has {layer.weight.numel()}. Set base_weights=int8."
            )
        product_dtype = torch.float32 if widened else layer.weight.dtype
        weight = layer.weight.detach().to(device)
        if storage == "nf4":
            stored = quantization.NF4Tensor.from_tensor(weight, 64, 256)
        else:
            stored = quantization.Int8Tensor.from_hp(weight, quantization.PerRow())
        layer.weight = nn.Parameter(stored, requires_grad=False)
        layer.__class__ = StoredLinear
        layer.product_dtype = product_dtype  # type: ignore[assignment]  # mypy takes it for a submodule


def dense(weight: Tensor) -> Tensor:
    """Return ``weight`` [out, in] itself, or dequantised if torchao stores it."""
    stored, kind = cast(Any, weight), type(weight).__name__  # an isinstance test would import torchao in every run
    whole: Tensor = weight
    if kind == "NF4Tensor":
        whole = stored.get_original_weight()
    elif kind == "Int8Tensor":
        whole = stored.dequantize()
    return whole


class StoredLinear(nn.Linear):
    """A frozen linear layer whose weight torchao stores."""

    product_dtype: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _StoredProduct.apply(x.flatten(0, -2), self.weight, self.bias, self.product_dtype)
        return y.unflatten(0, x.shape[:-1])


class _StoredProduct(torch.autograd.Function):
    """y = x W^T + b with a gradient for x. Autograd of the plain product would save W dequantised."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = dtype
        return F.linear(x.to(dtype), dense(weight).to(dtype), None if bias is None else bias.to(dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        (g,) = gradients
        return (g.to(ctx.dtype) @ dense(weight).to(ctx.dtype)).to(g.dtype), None, None, None
