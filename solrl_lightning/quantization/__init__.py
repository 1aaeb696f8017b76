"""NVFP4 and the shadow: the format, which layers are quantised, and the backends that run them."""

from solrl_lightning.quantization.backends import Backend, resolve
from solrl_lightning.quantization.convert import convert
from solrl_lightning.quantization.rules import LayerPlan, QuantizationRule, format_table, plan

__all__ = ["Backend", "LayerPlan", "QuantizationRule", "convert", "format_table", "plan", "resolve"]
