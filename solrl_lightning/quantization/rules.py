"""Choose the linear layers to quantise by a rule of name patterns, and replace them in a replica."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from solrl_lightning.errors import UserError
from solrl_lightning.quantization.backends import Backend
from solrl_lightning.quantization.linear import Conv1x1AsLinear, as_linear, is_linear


class QuantizationRule(NamedTuple):
    """Shell patterns over full module names; `*` also matches dots, and `exclude` takes precedence."""

    include: Sequence[str]  # linear layers to quantise, e.g. `transformer_blocks.*`
    exclude: Mapping[str, str] = {}  # of these, the layers to keep in BF16: pattern -> reason, which the table shows


class LayerPlan(NamedTuple):
    """Decision on one linear layer or 1x1 convolution."""

    name: str
    in_features: int
    out_features: int
    quantized: bool
    reason: str  # why it is skipped; empty when it is quantised


def plan(transformer: nn.Module, rule: QuantizationRule, backend: Backend) -> list[LayerPlan]:
    """Return one entry per linear layer, in module order.

    Raises:
        UserError: a pattern matches no linear layer, or the rule quantises none.
    """
    linears = {name: as_linear(module) for name, module in transformer.named_modules() if is_linear(module)}
    unused = [p for p in (*rule.include, *rule.exclude) if not any(fnmatchcase(name, p) for name in linears)]
    if unused:
        raise UserError(
            f"model.quantization is invalid: every pattern must match a linear layer; {', '.join(map(repr, unused))} "
            f"matches none. Correct or remove it. {_known_names(linears)}"
        )
    plans = []
    for name, linear in linears.items():
        reason = _reason_to_skip(name, linear, rule, backend)
        plans.append(LayerPlan(name, linear.in_features, linear.out_features, not reason, reason))
    if backend.linear_cls is not None and not any(p.quantized for p in plans):
        reasons = sorted({p.reason for p in plans})
        raise UserError(
            f"precision={backend.precision} is invalid: the rule must quantise at least one linear layer; it quantises "
            f"none of {len(plans)} ({'; '.join(reasons)}). Widen model.quantization.include, or use precision=bf16. "
            f"{_known_names(linears)}"
        )
    return plans


def convert(transformer: nn.Module, plans: Iterable[LayerPlan], backend: Backend) -> None:
    """Replace the planned layers of `transformer` by the backend's, in place and one at a time to save memory.

    Move or cast the replica before: the layers hold FP32 scales, and operands in a dtype chosen for the device.
    """
    for layer in plans:
        if layer.quantized and backend.linear_cls is not None:
            module = transformer.get_submodule(layer.name)
            quantized = backend.linear_cls(as_linear(module))
            replacement = Conv1x1AsLinear(quantized) if isinstance(module, nn.Conv2d) else quantized
            transformer.set_submodule(layer.name, replacement)


def format_table(plans: Sequence[LayerPlan]) -> str:
    """Return the plan as a table; layers whose names differ only in numbers share a row."""
    groups: dict[tuple, list[LayerPlan]] = {}
    for p in plans:
        groups.setdefault((_pattern(p.name), *p[1:]), []).append(p)
    total = sum(p.in_features * p.out_features for p in plans)

    def share(members: Sequence[LayerPlan]) -> str:
        return f"{100 * sum(p.in_features * p.out_features for p in members) / max(total, 1):.1f} %"

    rows = [("linear layers", "count", "in -> out", "share", "quantised")]
    for (name, *_), members in sorted(groups.items(), key=lambda item: not item[1][0].quantized):
        first = members[0]
        label = first.name if len(members) == 1 else name
        verdict = "yes" if first.quantized else f"no: {first.reason}"
        rows.append((label, str(len(members)), f"{first.in_features} -> {first.out_features}", share(members), verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"  {name:<{widths[0]}}  {count:>{widths[1]}}  {shape:>{widths[2]}}  {part:>{widths[3]}}  {verdict}"
        for name, count, shape, part, verdict in rows
    ]
    quantized = [p for p in plans if p.quantized]
    skipped = [p for p in plans if not p.quantized]
    lines.append(
        f"  {len(quantized)} of {len(plans)} linear layers quantised ({share(quantized)} of their weights), "
        f"{len(skipped)} not ({share(skipped)})"
    )
    return "\n".join(lines)


def _reason_to_skip(name: str, linear: nn.Linear, rule: QuantizationRule, backend: Backend) -> str:
    if backend.linear_cls is None:
        return f"precision={backend.precision}"
    for pattern, reason in rule.exclude.items():
        if fnmatchcase(name, pattern):
            return reason
    if not any(fnmatchcase(name, pattern) for pattern in rule.include):
        return "not included by the rule"
    return backend.linear_cls.unsupported_reason(linear)


def _pattern(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _known_names(linears: Mapping[str, nn.Linear]) -> str:
    if not linears:
        return "The transformer has no linear layer."
    return f"Its linear layers are: {', '.join(sorted({_pattern(name) for name in linears}))}."
