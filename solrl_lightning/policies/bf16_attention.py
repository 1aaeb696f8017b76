"""Attention of bfloat16 tensors on a CPU: with products in bfloat16 or in float32, whichever is faster there.

PyTorch's own attention in bfloat16 leaves most of the speed of AVX512_BF16 units unused, and its backward pass takes up
to ten times as long as in float32.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from solrl_lightning.policies.bf16 import has_fast_bf16_products

_SCORES = 2**19  # that `attention_in_bf16` computes at once: they stay in the cache
_LEAST_KEYS = 64  # for which `attention_in_bf16` is worth its rounding: the 26 of the model `tiny` gain little
# Greatest mean of the exponentials of a row; the least is its inverse. Rounding a score s to bfloat16 changes its
# weight by up to |s| 2^-9, and the greatest score of a row is then between -8.3 and 8.3 + log(keys).
_GREATEST_MEAN = 2.0**12


class FP32Attention(TorchFunctionMode):
    """Context in which ``scaled_dot_product_attention`` runs in float32 and rounds its result once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # whose Python code torch.compile of torch 2.11 cannot trace here
            func = torch.unflatten
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        dtype = (args[0] if args else kwargs["query"]).dtype
        args, kwargs = tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, (args, kwargs))
        return func(*args, **kwargs).to(dtype)


class BF16Attention(FP32Attention):
    """As `FP32Attention`, but with scores and products in bfloat16 where there is no mask and enough keys."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attends = func is F.scaled_dot_product_attention
        y = _attend(*args, **(kwargs or {})) if attends else None
        return super().__torch_function__(func, types, args, kwargs) if y is None else y


def _attend(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor | None:
    """Return `attention_in_bf16` of [B, heads, tokens, width], or None where it does not apply or would be slower."""
    if query.dtype != torch.bfloat16 or query.ndim != 4 or key.shape[2] < _LEAST_KEYS:
        return None
    if any(isinstance(option, Tensor) or option for option in (*others, *options.values())):  # a mask, dropout, ...
        return None
    if not query.shape[:2] == key.shape[:2] == value.shape[:2]:  # which broadcast
        return None
    y = attention_in_bf16(*(x.flatten(0, 1) for x in (query, key, value)), query.shape[3] ** -0.5)
    return y.unflatten(0, query.shape[:2])


@torch.library.custom_op("solrl::attention_in_bf16", mutates_args=())
def attention_in_bf16(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return softmax(s q k^T) v [N, L, D'] of q [N, L, D], k [N, M, D] and v [N, M, D']; products, scores, weights and
    their sums are rounded to bfloat16, or all but the result in float32 where scores are large (see `_weights`). One
    operation for torch.compile, which would unroll the loop."""
    results = []
    for q, k, v in _parts(query, key, value):
        weights, sums = _weights(q, k, scale)
        results.append(torch.bmm(weights, v.to(weights.dtype)).div_(sums).to(v.dtype))
    return torch.cat(results)


@torch.library.custom_op("solrl::attention_in_bf16_backward", mutates_args=())
def attention_in_bf16_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``query``, ``key`` and ``value``; computes the probabilities again."""
    results = []
    for q, k, v, g in _parts(query, key, value, gradient):
        weights, sums = _weights(q, k, scale)
        p = weights.div_(sums)
        q, k, v, g = (x.to(p.dtype) for x in (q, k, v, g))
        score_gradient = torch.ops.aten._softmax_backward_data(torch.bmm(g, v.mT), p, -1, p.dtype)
        dq, dk = _scaled_product(score_gradient, k, scale), _scaled_product(score_gradient.mT, q, scale)
        dv = torch.bmm(p.mT, g)  # p.mT @ g copies p
        results.append(tuple(x.to(query.dtype) for x in (dq, dk, dv)))
    dq, dk, dv = (torch.cat(parts) for parts in zip(*results, strict=True))
    return dq, dk, dv


def _parts(query: Tensor, key: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of all operands for which the cache holds the scores."""
    rows = max(1, _SCORES // (query.shape[1] * key.shape[1]))
    return zip(*(x.split(rows) for x in (query, key, *others)), strict=True)


def _weights(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return w [N, L, M] and its sums over the keys [N, L, 1], with w / sums = softmax(s q k^T).

    w is the exponential of the scores: subtracting their maximum first takes longer than all the rest. Where the mean
    of a row says that scores are large, so that rounding shows, w is the softmax in float32 and the sums are 1.
    """
    weights = _scaled_product(query, key.mT, scale).exp_()
    sums = weights.sum(-1, keepdim=True)
    least, most = sums.aminmax()
    if least > key.shape[1] / _GREATEST_MEAN and most < key.shape[1] * _GREATEST_MEAN:
        return weights, sums
    exact = _scaled_product(query.float(), key.float().mT, scale).softmax(-1)
    return exact, torch.ones_like(sums, dtype=exact.dtype)


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)  # which rounds once


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, ctx.scale = inputs
    ctx.save_for_backward(*operands)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *attention_in_bf16_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.scale), None


attention_in_bf16.register_autograd(_backward, setup_context=_save)
attention_in_bf16.register_fake(lambda query, key, value, scale: query.new_empty(*query.shape[:2], value.shape[2]))
attention_in_bf16_backward.register_fake(lambda gradient, *operands: tuple(x.new_empty(x.shape) for x in operands[:3]))


def use_fast_attention(transformer: nn.Module) -> None:
    """Replace the class of every attention module, in place; PyTorch's attention in bfloat16 is slow on CPUs.

    Attention then runs in `BF16Attention` where products of bfloat16 matrices are fast, else in `FP32Attention`.
    """
    mode = BF16Attention if has_fast_bf16_products() else FP32Attention
    for module in transformer.modules():
        if hasattr(module, "set_processor") and not hasattr(module, "attn_processors"):  # models have both
            module.__class__ = _attending_in(mode, type(module))  # type: ignore[arg-type]


@cache
def _attending_in(mode: type[FP32Attention], attention: type[nn.Module]) -> type[nn.Module]:
    in_own_dtype = attention.forward  # torch.compile cannot trace `attention.forward`: diffusers allows it in the graph

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.attention_mode():
            return in_own_dtype(self, *args, **kwargs)

    return type(attention.__name__, (attention,), {"forward": forward, "attention_mode": mode})
