"""Quantisation of the shadow: number formats, the choice of layers, and one backend per kind of hardware."""

from solrl_lightning.quantization.backends import Backend, choose_precision, resolve, resolve_from
from solrl_lightning.quantization.rules import LayerPlan, QuantizationRule, convert, format_table, plan

__all__ = [
    "Backend",
    "LayerPlan",
    "QuantizationRule",
    "choose_precision",
    "convert",
    "format_table",
    "plan",
    "resolve",
    "resolve_from",
]
