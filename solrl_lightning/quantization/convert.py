"""Turns a replica of a transformer into a shadow."""

from collections.abc import Iterable

from torch import nn

from solrl_lightning.quantization.backends import Backend
from solrl_lightning.quantization.rules import LayerPlan


def convert(transformer: nn.Module, plans: Iterable[LayerPlan], backend: Backend) -> None:
    """Replace the planned linear layers of `transformer`, a replica on its final device, by the backend's, in place.

    Move or cast it no more after that: the layers hold FP32 scales and operands of the dtype that suits their device.
    """
    for layer in plans:
        if layer.quantized and backend.linear_cls is not None:
            linear = transformer.get_submodule(layer.name)
            assert isinstance(linear, nn.Linear)
            transformer.set_submodule(layer.name, backend.linear_cls.from_linear(linear))
