"""The number formats of the shadow: a record for each.

A new format is a quantiser (``rowwise`` scales rows, ``nvfp4`` blocks), layers in ``scaled_linear``, a record here.

``solrl_lightning.names.BACKENDS`` has the same names, for checks that run before torch is loaded.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from solrl_lightning.quantization.linear import QuantizedLinear
from solrl_lightning.quantization.scaled_linear import (
    EmulatedFP8Linear,
    EmulatedINT8Linear,
    FP8Linear,
    INT8Linear,
    NVFP4Linear,
    ScaledLinear,
)


class NativeBackend(NamedTuple):
    """A backend whose hardware multiplies numbers of the format."""

    layer: Callable[[], type[QuantizedLinear]]  # imports it
    bits_per_weight: float
    capability: tuple[int, int]  # minimum compute capability of an NVIDIA GPU
    cpu: bool = False  # also runs on a CPU with INT8 units
    fullgraph: bool = True
    package: str = ""  # a key of backends.PACKAGES, which it needs


class Format(NamedTuple):
    """A number format of the shadow's weights and inputs."""

    name: str  # of ``precision``
    emulated: type[ScaledLinear]  # with the quantisers of weight and input
    tolerance: float  # of a layer's largest error, as a share of the largest output
    native: Mapping[str, NativeBackend]  # by name, best first; empty where no hardware multiplies it


def _packed_nvfp4() -> type[QuantizedLinear]:
    from solrl_lightning.quantization.nvfp4_packed import PackedNVFP4Linear

    return PackedNVFP4Linear


def _transformer_engine() -> type[QuantizedLinear]:
    from solrl_lightning.quantization.transformer_engine import TransformerEngineLinear

    return TransformerEngineLinear


# Tolerances: BF16 rounds an output by 2^-9, and twice on a CPU with BF16 units. Compiled code may round a value between
# two codes to the other code. FP8 units of capability 9.0 keep 14 bits of a sum.
NVFP4 = Format(
    "nvfp4",
    NVFP4Linear,
    2**-6,
    {
        "torch": NativeBackend(_packed_nvfp4, 4.5, (10, 0)),  # first: a block stays one graph, which fuses scales
        "transformer_engine": NativeBackend(
            _transformer_engine, 4.5, (10, 0), fullgraph=False, package="transformer_engine"
        ),
    },
)
FP8 = Format("fp8", EmulatedFP8Linear, 2**-5, {"torch": NativeBackend(lambda: FP8Linear, 8, (8, 9))})
INT8 = Format("int8", EmulatedINT8Linear, 2**-7, {"torch": NativeBackend(lambda: INT8Linear, 8, (8, 0), cpu=True)})

FORMATS = {each.name: each for each in (NVFP4, FP8, INT8)}
"""By name, in the order of ``precision=auto``."""
