"""Turns a replica of a transformer into a shadow."""

from collections.abc import Iterable

from torch import nn

from solrl_lightning.quantization.backends import Backend
from solrl_lightning.quantization.pointwise import Pointwise, as_linear
from solrl_lightning.quantization.rules import LayerPlan


def convert(transformer: nn.Module, plans: Iterable[LayerPlan], backend: Backend) -> None:
    """Replace the planned layers of `transformer`, a replica on its final device, by the backend's, in place.

    Layer by layer, so that no more than one of them exists twice. Move or cast the replica no more after that: the
    layers hold FP32 scales and operands of the dtype that suits their device.
    """
    for layer in plans:
        if layer.quantized and backend.linear_cls is not None:
            module = transformer.get_submodule(layer.name)
            quantized = backend.linear_cls.from_linear(as_linear(module))
            replacement = Pointwise(quantized) if isinstance(module, nn.Conv2d) else quantized
            transformer.set_submodule(layer.name, replacement)
