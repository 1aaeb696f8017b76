"""Quantises an input once when several layers get one and the same tensor in turn, as to_q, to_k and to_v do.

Only in eager mode, where quantisation costs more than the product of a narrow layer; compiled code is a graph of
tensors without such a memory, and quantising is cheap there. What is remembered of an input is freed with the input.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

Quantized = tuple[Tensor, Tensor]  # values or codes, and their scale


class LastInput:
    """A quantiser of tensors to a dtype that remembers its last result as long as the input lives."""

    def __init__(self, quantize: Callable[[Tensor, torch.dtype], Quantized]) -> None:
        self.quantize = quantize
        self.x: Callable[[], Tensor | None] = lambda: None
        self.version = 0
        self.dtype = torch.float32
        self.result: Quantized | None = None

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Quantized:
        # A tensor of inference mode does not count its changes, so nothing is remembered of it.
        if torch.compiler.is_compiling() or x.is_inference():
            return self.quantize(x, dtype)
        if self.result is None or self.x() is not x or self.version != x._version or self.dtype != dtype:
            self.result = None  # free the old one first
            self.x, self.version, self.dtype = weakref.ref(x, self._forget), x._version, dtype
            self.result = self.quantize(x, dtype)
        return self.result

    def _forget(self, x: "weakref.ref[Tensor]") -> None:
        self.result = None
