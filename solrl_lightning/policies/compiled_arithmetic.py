"""Arithmetic of compiled blocks on a CPU: attention with bfloat16 products, and GELU by the logistic function.

Compiled blocks have other bits than eager ones in any case; these operations round more, and Inductor's are slower.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models import activations
from torch import Tensor, nn
from torch.nn import functional as F

from solrl_lightning.policies.bf16 import FP32Attention, has_fast_bf16_products

_SCORES = 2**19  # that `attention_in_bf16` computes at once: they stay in the cache
_LEAST_KEYS = 64  # for which `attention_in_bf16` was faster: 26 keys take 1.2 times as long, 64 0.64 times


class BF16Attention(FP32Attention):
    """As `FP32Attention`, but with scores and products in bfloat16 where there is no mask and enough keys.

    PyTorch's own attention of bfloat16 tensors on a CPU leaves most of the speed of AVX512_BF16 units unused.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attends = func is F.scaled_dot_product_attention
        y = _attend(*args, **(kwargs or {})) if attends else None
        return super().__torch_function__(func, types, args, kwargs) if y is None else y


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **others: Any) -> Tensor | None:
    """Return `attention_in_bf16` of [B, heads, tokens, width], or None where it does not apply or would be slower."""
    if query.dtype != torch.bfloat16 or query.ndim != 4 or key.shape[2] < _LEAST_KEYS:
        return None
    if attn_mask is not None or any(others.values()):  # dropout_p, is_causal, scale, enable_gqa
        return None
    y = attention_in_bf16(*(x.flatten(0, 1) for x in (query, key, value)), query.shape[3] ** -0.5)
    return y.unflatten(0, query.shape[:2])


@torch.library.custom_op("solrl::attention_in_bf16", mutates_args=())
def attention_in_bf16(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return softmax(s q k^T) v [N, L, D'] of q [N, L, D], k [N, M, D] and v [N, M, D']; products, scores and
    probabilities are rounded to bfloat16. One operation for torch.compile, which would unroll the loop."""
    return torch.cat([_probabilities(q, k, scale) @ v for q, k, v in _parts(query, key, value)])


@torch.library.custom_op("solrl::attention_in_bf16_backward", mutates_args=())
def attention_in_bf16_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``query``, ``key`` and ``value``; computes the probabilities again."""
    results = []
    for q, k, v, g in _parts(query, key, value, gradient):
        p = _probabilities(q, k, scale)
        score_gradient = torch.ops.aten._softmax_backward_data(g @ v.mT, p, -1, p.dtype)
        dq, dk = _scaled_product(score_gradient, k, scale), _scaled_product(score_gradient.mT, q, scale)
        results.append((dq, dk, p.mT @ g))
    dq, dk, dv = (torch.cat(parts) for parts in zip(*results, strict=True))
    return dq, dk, dv


def _parts(query: Tensor, key: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of all operands for which the cache holds the scores."""
    rows = max(1, _SCORES // (query.shape[1] * key.shape[1]))
    return zip(*(x.split(rows) for x in (query, key, *others)), strict=True)


def _probabilities(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return _scaled_product(query, key.mT, scale).softmax(-1)


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


class LogisticGELU(nn.GELU):
    """The tanh approximation of GELU as x * sigmoid(2 u), which is (1 + tanh(u)) / 2 * x and vectorises better."""

    def forward(self, x: Tensor) -> Tensor:
        return logistic_gelu(x)


class ProjectedLogisticGELU(activations.GELU):
    """As `LogisticGELU`, after a linear layer."""

    def gelu(self, gate: Tensor) -> Tensor:
        return logistic_gelu(gate)


def logistic_gelu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)


def use_compiled_arithmetic(transformer: nn.Module) -> None:
    """Replace what Inductor computes slowly on a CPU, in place: attention, if bfloat16 products are fast, and GELU."""
    module: Any
    for module in transformer.modules():
        if hasattr(module, "attention_mode") and has_fast_bf16_products():
            module.attention_mode = BF16Attention
        if getattr(module, "approximate", None) == "tanh":
            if type(module) is nn.GELU:
                module.__class__ = LogisticGELU
            elif type(module) is activations.GELU:
                module.__class__ = ProjectedLogisticGELU
