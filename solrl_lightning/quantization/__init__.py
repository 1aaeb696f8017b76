"""Quantisation of the shadow: number formats, the choice of layers, and one backend per kind of hardware."""

from solrl_lightning.quantization.backends import Backend, resolve
from solrl_lightning.quantization.rules import LayerPlan, QuantizationRule, convert, format_table, plan

__all__ = ["Backend", "LayerPlan", "QuantizationRule", "convert", "format_table", "plan", "resolve"]
