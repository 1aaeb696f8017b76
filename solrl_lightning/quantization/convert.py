"""Turns a replica of a transformer into a shadow, and loads new weights into the shadow in place."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from solrl_lightning.quantization.backends import Backend
from solrl_lightning.quantization.emulated import NVFP4Linear
from solrl_lightning.quantization.rules import LayerPlan, QuantizationRule, plan


def convert(transformer: nn.Module, rule: QuantizationRule, backend: Backend) -> list[LayerPlan]:
    """Replace the planned linear layers of `transformer` (a plain replica, moved to its device and dtype) by the backend's, in place.

    Move or cast it no more after that: the layers hold FP32 scales and choose their operands' dtype for the device they were made on.
    """
    plans = plan(transformer, rule, backend)
    for layer in plans:
        if layer.quantized:
            assert backend.linear_cls is not None
            linear = transformer.get_submodule(layer.name)
            assert isinstance(linear, nn.Linear)
            transformer.set_submodule(layer.name, backend.linear_cls.from_linear(linear))
    return plans


@torch.no_grad()
def refresh(transformer: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights [out, in] by the names of linear layers, quantised or not, into the tensors that are there: no recompilation."""
    for name, weight in weights.items():
        layer = transformer.get_submodule(name)
        if isinstance(layer, NVFP4Linear):
            layer.refresh(weight)
        else:
            assert isinstance(layer, nn.Linear)
            layer.weight.copy_(weight)
