"""Quantise a tensor once for all layers that read it, as to_q, to_k and to_v do."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

Quantized = tuple[Tensor, Tensor]  # values or codes, and scale


class CachedQuantizer:
    """Caches the last result of ``quantize(x, dtype)``; the cache is freed with x.

    Caches in eager mode only, where quantising costs more than the product of a narrow layer. Compiled code quantises
    once for each layer: Inductor fuses the quantisers of one tensor into one kernel, which stores a result for each.
    """

    def __init__(self, quantize: Callable[[Tensor, torch.dtype], Quantized]) -> None:
        self.quantize = quantize
        self.x: Callable[[], Tensor | None] = lambda: None
        self.version, self.dtype = 0, torch.float32
        self.result: Quantized | None = None

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Quantized:
        # Inference tensors have no version counter, so an in-place change would go unnoticed.
        if torch.compiler.is_compiling() or x.is_inference():
            return self.quantize(x, dtype)
        if self.result is None or self.x() is not x or self.version != x._version or self.dtype != dtype:
            self.result = None  # free the old one first
            self.x, self.version, self.dtype = weakref.ref(x, self._forget), x._version, dtype
            self.result = self.quantize(x, dtype)
        return self.result

    def _forget(self, x: "weakref.ref[Tensor]") -> None:
        self.result = None
