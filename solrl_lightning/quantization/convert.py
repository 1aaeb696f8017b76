"""Convert a replica of a transformer into a shadow."""

from collections.abc import Iterable

from torch import nn

from solrl_lightning.quantization.backends import Backend
from solrl_lightning.quantization.pointwise import Conv1x1AsLinear, as_linear
from solrl_lightning.quantization.rules import LayerPlan


def convert(transformer: nn.Module, plans: Iterable[LayerPlan], backend: Backend) -> None:
    """Replace the planned layers of `transformer` by the backend's, in place and one at a time to save memory.

    Move or cast the replica before, not after: the layers hold FP32 scales, and operands in a dtype chosen for the
    device.
    """
    for layer in plans:
        if layer.quantized and backend.linear_cls is not None:
            module = transformer.get_submodule(layer.name)
            quantized = backend.linear_cls.from_linear(as_linear(module))
            replacement = Conv1x1AsLinear(quantized) if isinstance(module, nn.Conv2d) else quantized
            transformer.set_submodule(layer.name, replacement)
