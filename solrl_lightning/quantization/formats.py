"""The number formats of the shadow: a record for each.

A new format is a quantiser (``rowwise`` scales rows, ``nvfp4`` blocks), layers in ``scaled_linear``, a record here.

``solrl_lightning.names.BACKENDS`` has the same names, for checks that run before torch is loaded.
"""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import NamedTuple

from solrl_lightning.quantization.linear import QuantizedLinear
from solrl_lightning.quantization.scaled_linear import EmulatedFP8Linear, EmulatedINT8Linear, NVFP4Linear, ScaledLinear


class NativeBackend(NamedTuple):
    """A backend whose hardware multiplies numbers of the format."""

    cls: str  # of its layers, below ``solrl_lightning.quantization``
    bits_per_weight: float
    capability: tuple[int, int]  # minimum compute capability of an NVIDIA GPU
    cpu: bool = False  # also runs on a CPU with INT8 units
    fullgraph: bool = True
    package: str = ""  # a key of backends.PACKAGES, which it needs

    def layer(self) -> type[QuantizedLinear]:
        """Import the class of its layers."""
        layer: type[QuantizedLinear] = resolve_name(f"solrl_lightning.quantization.{self.cls}")
        return layer


class Format(NamedTuple):
    """A number format of the shadow's weights and inputs."""

    name: str  # of ``precision``
    emulated: type[ScaledLinear]  # with the quantisers of weight and input
    tolerance: float  # of a layer's largest error, as a share of the largest output
    native: Mapping[str, NativeBackend]  # by name, best first; empty where no hardware multiplies it


# Tolerances: BF16 rounds an output by 2^-9, and twice on a CPU with BF16 units. Compiled code may round a value between
# two codes to the other code. FP8 units of capability 9.0 keep 14 bits of a sum.
NVFP4 = Format(
    "nvfp4",
    NVFP4Linear,
    2**-6,
    {
        # First: a block stays one graph, which fuses scales.
        "torch": NativeBackend("nvfp4_packed.PackedNVFP4Linear", 4.5, (10, 0)),
        "transformer_engine": NativeBackend(
            "transformer_engine.TransformerEngineLinear", 4.5, (10, 0), fullgraph=False, package="transformer_engine"
        ),
    },
)
FP8 = Format("fp8", EmulatedFP8Linear, 2**-5, {"torch": NativeBackend("scaled_linear.FP8Linear", 8, (8, 9))})
INT8 = Format(
    "int8", EmulatedINT8Linear, 2**-7, {"torch": NativeBackend("scaled_linear.INT8Linear", 8, (8, 0), cpu=True)}
)

FORMATS = {each.name: each for each in (NVFP4, FP8, INT8)}
"""By name, in the order of ``precision=auto``."""
