"""Rows of task=doctor that run layers of the shadow in the model's real shapes.

Weights are random. Shapes: M tokens, D inputs and N outputs of a linear layer.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from solrl_lightning.artifacts.tables import OK, WRONG, Row, judged
from solrl_lightning.errors import UserError
from solrl_lightning.names import BACKENDS
from solrl_lightning.policies.bf16 import has_fast_bf16_products, use_fp32_products
from solrl_lightning.quantization import Backend, resolve
from solrl_lightning.quantization.formats import FORMATS
from solrl_lightning.quantization.transformer_engine import TransformerEngineLinear, with_limit
from solrl_lightning.sizing.plan import Plan
from solrl_lightning.sizing.timing import format_seconds, least_seconds

_MOST_ROWS = {"cuda": 16384, "cpu": 1024}  # of a layer's input
_FASTER = 0.9  # of the chosen backend's seconds, below which another one is named
_COMPARED = 256  # rows that are compared with the exact product
NO_SHADOW = "family=prefix, which needs no shadow"


def judge_backend(backend: Backend, device: torch.device, used: bool) -> Row:
    others = {name: resolve(name, "auto", device).name for name in BACKENDS if name not in (backend.precision, "bf16")}
    measured = {"precision": backend.precision, "backend": backend.name, "others": others}
    if not used:
        return Row("precision", OK, "none: no stage of this family samples from the shadow", "", measured)
    text = (
        f"{backend.description.rstrip('.')}. Others here: {', '.join(f'{name} ({by})' for name, by in others.items())}"
    )
    expected = "a backend that is not emulated" if device.type == "cuda" else ""
    faster = [f"precision={name}" for name, by in others.items() if by != "emulated"]
    slow = backend.name == "emulated" and device.type == "cuda"
    return judged("precision", text, " or ".join([*faster, NO_SHADOW]), measured, expected, slow=slow)


def quantized_shapes(run: Plan) -> dict[tuple[int, int], int]:
    """Return (D, N) of each shape of linear layers that the shadow quantises, with the most tokens of one image."""
    tokens: dict[tuple[int, int], int] = {}
    for layer in run.layers:
        if layer.quantized:
            shape = layer.in_features, layer.out_features
            tokens[shape] = max(tokens.get(shape, 0), run.passes.tokens[layer.name])
    return tokens


@torch.no_grad()
def check_layers(run: Plan, backend: Backend, batch: int, device: torch.device, compiled: bool) -> Iterator[Row]:
    """Yield a row on the numbers and the speed of one layer of each shape that the shadow quantises."""
    for (inputs, outputs), count in quantized_shapes(run).items():
        linear = nn.Linear(inputs, outputs, device=device, dtype=torch.bfloat16)
        layer = quantized_layer(backend, linear, compiled)
        rows = min(count * batch, _MOST_ROWS[device.type])
        x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
        y = layer(x)
        limit = layer.limit if isinstance(layer, TransformerEngineLinear) else None
        error = largest_error(y, x, linear, backend.precision, limit)
        if device.type == "cpu" and not has_fast_bf16_products():
            use_fp32_products(linear)
        calls = {"bf16": partial(linear, x), "layer": partial(_fresh, layer, x)}
        seconds = least_seconds(calls, device)
        speed = judge_speed(f"layer {inputs}->{outputs}", backend, seconds["layer"], seconds["bf16"], compiled)
        yield judge_error(speed._replace(result=f"{rows} rows in {speed.result}"), error, backend.precision)


def native_backends(device: torch.device) -> dict[str, Backend]:
    """Return the backends whose precision ``device`` multiplies, by "precision (backend)"."""
    backends = {}
    for precision, names in BACKENDS.items():
        for name in set(names) - {"auto", "emulated"}:
            with suppress(UserError):  # it does not run here
                backends[f"{precision} ({name})"] = resolve(precision, name, device)
    return dict(sorted(backends.items()))


@torch.no_grad()
def compare_backends(run: Plan, chosen: Backend, batch: int, device: torch.device, compiled: bool) -> Iterator[Row]:
    """Yield a row with the seconds of the largest quantised layer by every backend that computes in its precision."""
    (inputs, outputs), count = max(quantized_shapes(run).items(), key=lambda item: item[1] * math.prod(item[0]))
    linear = nn.Linear(inputs, outputs, device=device, dtype=torch.bfloat16)
    x = torch.randn(min(count * batch, _MOST_ROWS[device.type]), inputs, device=device, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {"bf16": partial(linear, x)}
    failures = dict[str, str]()
    for name, backend in native_backends(device).items():
        try:
            layer = quantized_layer(backend, linear, compiled)
            calls[name] = partial(_fresh, layer, x)
            calls[name]()
        except Exception as error:  # of a kernel, a compiler or an extension that this row is to find
            calls.pop(name, None)
            failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    seconds = least_seconds(calls, device)
    yield judge_backends(f"backends {inputs}->{outputs}", f"{chosen.precision} ({chosen.name})", seconds, failures)


def quantized_layer(backend: Backend, linear: nn.Linear, compiled: bool) -> nn.Module:
    assert backend.linear_cls is not None
    torch.compiler.reset()
    layer = backend.linear_cls(linear)
    if compiled:
        layer.compile(fullgraph=backend.fullgraph, dynamic=False)
    return layer


def _fresh(layer: nn.Module, x: Tensor) -> Tensor:
    """Call an eager layer, which caches the quantised input of the last tensor; a view is another tensor."""
    return layer(x.view_as(x))


def judge_backends(check: str, chosen: str, seconds: Mapping[str, float], failures: Mapping[str, str]) -> Row:
    """Return the row on all backends: wrong if ``chosen`` fails, slow if a native one is 10 % faster."""
    times = [f"{name} {format_seconds(value)}" for name, value in seconds.items()]
    text = ", ".join(times) + "".join(f"; {name} fails ({reason})" for name, reason in failures.items())
    measured = {"seconds": dict(seconds), "failures": dict(failures)}
    expected = f"{chosen} works, and the fastest takes at least {_FASTER:g} of its seconds"
    fastest = min(seconds, key=seconds.__getitem__)
    precision, _, backend = fastest.partition(" ")
    way_out = f"precision={precision} precision.backend={backend.strip('()')}" if backend else NO_SHADOW
    slow = seconds[fastest] < _FASTER * seconds.get(chosen, 0)
    return judged(check, text, way_out, measured, expected, wrong=chosen in failures, slow=slow)


def largest_error(y: Tensor, x: Tensor, linear: nn.Linear, precision: str, limit: float | None = None) -> float:
    """Return the largest error of y [M, N] relative to the largest output; the reference is the product of quantised
    operands.

    ``limit``: of a layer whose input has a constant scale.
    """
    step = max(1, len(x) // _COMPARED)
    emulated = FORMATS[precision].emulated
    if limit is None:
        values, scale = emulated.quantize_input.quantize(x, torch.float32)
    else:
        values, scale = emulated.quantize_weight(with_limit(x, limit), torch.float32)
    weight, weight_scale = emulated.quantize_weight(linear.weight, torch.float32)
    exact = values[: len(x) : step].double() @ weight.double().t() * scale.expand(len(x), 1)[::step] * weight_scale.t()
    exact += linear.bias.double()
    return ((y[::step].double() - exact).abs().max() / exact.abs().max()).item()


def judge_speed(check: str, backend: Backend, seconds: float, bf16: float, compiled: bool) -> Row:
    """Return the row on a layer's speed: slow if a backend other than the emulation is slower than BF16."""
    how = "compiled" if compiled else "eager"
    text = f"{format_seconds(seconds)}, {seconds / bf16:.2f} x BF16's {format_seconds(bf16)}, {how}"
    measured = {"seconds": seconds, "bf16_seconds": bf16, "compiled": compiled}
    quantized = backend.name != "emulated" and backend.linear_cls is not None
    expected, slow = "at most BF16's seconds" if quantized else "", quantized and seconds > bf16
    way_out = f"{'another precision' if compiled else 'family.compile=true'}, or {NO_SHADOW}"
    return judged(check, text, way_out, measured, expected, slow=slow)


def judge_error(speed: Row, error: float, precision: str) -> Row:
    """Return the row on a layer's speed with its error added: wrong if the error exceeds the tolerance."""
    tolerance = FORMATS[precision].tolerance
    text = f"{speed.result}; error {error:.1e} of the largest output, tolerated {tolerance:.1e}"
    measured = {**(speed.measured or {}), "error": error, "tolerance": tolerance}
    of_error = f"an error of at most {tolerance:.1e}: BF16 rounds outputs, and compiled code the inputs"
    expected = "; ".join(filter(None, [of_error, speed.expected]))
    row = speed._replace(result=text, measured=measured, expected=expected)
    if error <= tolerance:
        return row
    return row._replace(status=WRONG, way_out="precision.backend=emulated, and a report of this with doctor.json")
