"""Rows of task=doctor that run layers and blocks of the shadow in the model's real shapes.

Weights are random. Shapes: M tokens, D inputs and N outputs of a linear layer.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor, nn

from solrl_lightning.artifacts.tables import OK, SLOW, WRONG, Row
from solrl_lightning.build import levels_of, lora_config, quantization_rule
from solrl_lightning.errors import UserError
from solrl_lightning.names import BACKENDS
from solrl_lightning.options.run import Run
from solrl_lightning.policies.architectures import Architecture
from solrl_lightning.policies.bf16 import has_fast_bf16_products, use_fp32_products
from solrl_lightning.policies.compilation import should_compile
from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.quantization import Backend, resolve
from solrl_lightning.quantization.scaled_linear import EMULATED
from solrl_lightning.quantization.transformer_engine import TransformerEngineLinear, with_limit
from solrl_lightning.rollout.records import EncodedPrompts
from solrl_lightning.tasks.benchmark import alternate
from solrl_lightning.tasks.plan import Shapes
from solrl_lightning.training.samplers import MERGED, POLICY, REFERENCE, SHADOW, Samplers

# Shares of the largest output. BF16 rounds an output by 2^-9, and twice on a CPU with BF16 units. Compiled code may
# round a value between two codes to the other code. FP8 units of capability 9.0 keep 14 bits of a sum.
_TOLERANCE = {"nvfp4": 2**-6, "fp8": 2**-5, "int8": 2**-7}
_MOST_ROWS = {"cuda": 16384, "cpu": 1024}  # of a layer's input
_COMPARED = 256  # rows that are compared with the exact product
_BLOCKS = 2  # of each kind
_CPU_MACS = 2 * 10**8  # of the whole model; sets the batch of the blocks on a CPU
_ROUNDS, _SECONDS = 20, 0.5  # maximum number of timed calls, and the time after which no call starts
NO_SHADOW = "family=prefix, which needs no shadow"


def judge_backend(backend: Backend, device: torch.device, used: bool) -> Row:
    others = {name: resolve(name, "auto", device).name for name in BACKENDS if name not in (backend.precision, "bf16")}
    measured = {"precision": backend.precision, "backend": backend.name, "others": others}
    if not used:
        return Row("precision", OK, "none: no stage of this family samples from the shadow", "", measured)
    found = (
        f"{backend.description.rstrip('.')}. Others here: {', '.join(f'{name} ({by})' for name, by in others.items())}"
    )
    if backend.name == "emulated" and device.type == "cuda":
        faster = [f"precision={name}" for name, by in others.items() if by != "emulated"]
        return Row("precision", SLOW, found, " or ".join([*faster, NO_SHADOW]), measured)
    return Row("precision", OK, found, "", measured)


def quantized_shapes(model: Shapes) -> dict[tuple[int, int], int]:
    """Return (D, N) of each shape of linear layers that the shadow quantises, with the most tokens of one image."""
    tokens: dict[tuple[int, int], int] = {}
    for plan in model.layers:
        if plan.quantized:
            shape = plan.in_features, plan.out_features
            tokens[shape] = max(tokens.get(shape, 0), model.passes.layers[plan.name] // math.prod(shape))
    return tokens


@torch.no_grad()
def layers(model: Shapes, backend: Backend, batch: int, device: torch.device, compiled: bool) -> Iterator[Row]:
    """Yield a row on the numbers and the speed of one layer of each shape that the shadow quantises."""
    assert backend.linear_cls is not None
    for (inputs, outputs), count in quantized_shapes(model).items():
        torch.compiler.reset()
        linear = nn.Linear(inputs, outputs, device=device, dtype=torch.bfloat16)
        layer = backend.linear_cls(linear)
        if compiled:
            layer.compile(fullgraph=backend.fullgraph, dynamic=False)
        rows = min(count * batch, _MOST_ROWS[device.type])
        x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
        y = layer(x)
        limit = layer.limit if isinstance(layer, TransformerEngineLinear) else None
        error = largest_error(y, x, linear, backend.precision, limit)
        if device.type == "cpu" and not has_fast_bf16_products():
            use_fp32_products(linear)
        # An eager layer caches the quantised input of the last tensor; a view is another tensor.
        calls = {"bf16": partial(linear, x), "layer": partial(lambda layer, x: layer(x.view_as(x)), layer, x)}
        seconds = least_seconds(calls, device)
        speed = judge_speed(f"layer {inputs}->{outputs}", backend, seconds["layer"], seconds["bf16"], compiled)
        yield judge_error(speed._replace(found=f"{rows} rows in {speed.found}"), error, backend.precision)


def native_backends(device: torch.device) -> dict[str, Backend]:
    """Return the backends whose precision ``device`` multiplies, by "precision (backend)"."""
    backends = {}
    for precision, names in BACKENDS.items():
        for name in set(names) - {"auto", "emulated"}:
            with suppress(UserError):  # it does not run here
                backends[f"{precision} ({name})"] = resolve(precision, name, device)
    return dict(sorted(backends.items()))


@torch.no_grad()
def compare_backends(model: Shapes, chosen: Backend, batch: int, device: torch.device, compiled: bool) -> Iterator[Row]:
    """Yield a row with the seconds of the largest quantised layer by every backend that computes in its precision."""
    (inputs, outputs), count = max(quantized_shapes(model).items(), key=lambda item: item[1] * math.prod(item[0]))
    linear = nn.Linear(inputs, outputs, device=device, dtype=torch.bfloat16)
    x = torch.randn(min(count * batch, _MOST_ROWS[device.type]), inputs, device=device, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {"bf16": partial(linear, x)}
    for name, backend in native_backends(device).items():
        assert backend.linear_cls is not None
        torch.compiler.reset()
        layer = backend.linear_cls(linear)
        if compiled:
            layer.compile(fullgraph=backend.fullgraph, dynamic=False)
        calls[name] = partial(lambda layer, x: layer(x.view_as(x)), layer, x)  # a view is not in an eager layer's cache
    seconds = least_seconds(calls, device)
    yield judge_backends(f"backends {inputs}->{outputs}", f"{chosen.precision} ({chosen.name})", seconds)


def judge_backends(check: str, chosen: str, seconds: Mapping[str, float]) -> Row:
    """The row on all backends: slow if a native one takes less than 0.9 of the time of ``chosen``."""
    found = ", ".join(f"{name} {format_seconds(value)}" for name, value in seconds.items())
    fastest = min(seconds, key=seconds.__getitem__)
    slow = chosen in seconds and seconds[fastest] < 0.9 * seconds[chosen]
    precision, _, backend = fastest.partition(" ")
    way_out = f"precision={precision} precision.backend={backend.strip('()')}" if backend else NO_SHADOW
    return Row(check, SLOW if slow else OK, found, way_out if slow else "", {"seconds": dict(seconds)})


def largest_error(y: Tensor, x: Tensor, linear: nn.Linear, precision: str, limit: float | None = None) -> float:
    """Largest error of y [M, N] relative to the largest output; the reference is the product of quantised operands.

    ``limit``: of a layer whose input has a constant scale.
    """
    step = max(1, len(x) // _COMPARED)
    quantize = EMULATED[precision].quantize_weight
    if limit is None:
        values, scale = EMULATED[precision].quantize_input.quantize(x, torch.float32)
    else:
        values, scale = quantize(with_limit(x, limit), torch.float32)
    weight, weight_scale = quantize(linear.weight, torch.float32)
    exact = values[: len(x) : step].double() @ weight.double().t() * scale.expand(len(x), 1)[::step] * weight_scale.t()
    exact += linear.bias.double()
    return ((y[::step].double() - exact).abs().max() / exact.abs().max()).item()


def judge_speed(check: str, backend: Backend, seconds: float, bf16: float, compiled: bool) -> Row:
    """The row on a layer's speed: slow if a backend other than the emulation is slower than BF16."""
    how = "compiled" if compiled else "eager"
    found = f"{format_seconds(seconds)}, {seconds / bf16:.2f} x BF16's {format_seconds(bf16)}, {how}"
    measured = {"seconds": seconds, "bf16_seconds": bf16, "compiled": compiled}
    slow = backend.name != "emulated" and backend.linear_cls is not None and seconds > bf16
    way_out = f"{'another precision' if compiled else 'family.compile=true'}, or {NO_SHADOW}"
    return Row(check, SLOW if slow else OK, found, way_out if slow else "", measured)


def format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def judge_error(speed: Row, error: float, precision: str) -> Row:
    """The row on a layer's speed with its error added: wrong if the error exceeds the tolerance."""
    tolerance = _TOLERANCE[precision]
    found = f"{speed.found}; error {error:.1e} of the largest output, tolerated {tolerance:.1e}"
    measured = {**(speed.measured or {}), "error": error, "tolerance": tolerance}
    if not error <= tolerance:
        way_out = "precision.backend=emulated, and a report of this with doctor.json"
        return Row(speed.check, WRONG, found, way_out, measured)
    return speed._replace(found=found, measured=measured)


def least_seconds(calls: Mapping[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Minimum seconds of each call, without its first. Other load can only increase a time."""
    seconds = alternate(calls, device, 1 + _ROUNDS, limit=_SECONDS)
    return {name: min(values[1:]) for name, values in seconds.items()}


# Compilation


def without_files(cfg: Run) -> Run:
    """A copy of the configuration whose policy reads config files only."""
    changed = cfg.model_copy(deep=True)
    policy: dict[str, Any] = changed.model.policy  # type: ignore[assignment]
    policy.update(dict.fromkeys({"embeddings", "preview_decoder", "transformer_weights"} & policy.keys()))
    return changed


def write_short(architecture: Architecture, folder: Path) -> None:
    """Write the config files of the pipeline with a few blocks of each kind.

    The first blocks of some Stable Diffusion 3.5 have a second attention; as many without one follow them.
    """
    index: dict[str, Any] = {"_class_name": architecture.pipeline}
    for name in ("transformer", "vae", "scheduler"):
        library, cls, config = architecture.components[name]
        short = dict(config)
        if name == "transformer":
            dual = config.get("dual_attention_layers", [])[:_BLOCKS]
            short |= {key: min(_BLOCKS, config[key]) for key in {"num_layers", "num_single_layers"} & config.keys()}
            if dual:
                short |= {"dual_attention_layers": dual, "num_layers": _BLOCKS + len(dual)}
        file = folder / name / ("scheduler_config.json" if name == "scheduler" else "config.json")
        file.parent.mkdir()
        file.write_text(json.dumps(short))
        index[name] = [library, cls]
    (folder / "model_index.json").write_text(json.dumps(index))


@torch.no_grad()
def blocks(cfg: Run, model: Shapes, shadow: Backend | None, device: torch.device, compiled: bool) -> Iterator[Row]:
    """Compile a few blocks of all samplers for both batch sizes, refresh and time the replicas, and yield the rows."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second to import

    with TemporaryDirectory() as folder:
        write_short(model.architecture, Path(folder))
        own = without_files(cfg).model.policy
        policy = instantiate(own, pretrained=folder, weights="random", device=str(device))
    torch.compiler.reset()
    compiler = CompileCounterWithBackend("inductor" if compiled else "eager")
    trains, _ = should_compile("compile_training", "training steps", cfg.compile_training, device)
    samplers = Samplers(
        policy,
        lora_config(cfg),
        cfg.seed,
        cfg.model.rollout_batch,
        compile_replicas=True,
        compile_policy=trains,
        with_shadow=shadow is not None,
        backend=shadow or resolve("bf16", "auto", device),
        rule=quantization_rule(cfg),
        compiler=compiler,
    )

    def inputs(most: int) -> tuple[Tensor, Tensor, Conditioning]:
        batch = most if device.type == "cuda" else max(1, min(most, _CPU_MACS // model.passes.forward))
        _, conditioning = EncodedPrompts([""], policy.encode([""])).gather(torch.zeros(batch, dtype=torch.int64))
        return policy.noise(torch.arange(batch)), torch.full((batch,), 0.5, device=device), conditioning

    def velocity(name: str, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        with samplers.use(name) as transformer:
            return policy.guided_velocity(transformer, x, sigma, conditioning)

    rollout, training = inputs(cfg.model.rollout_batch), inputs(cfg.model.micro_batch)
    calls = {name: partial(velocity, name, *rollout) for name in samplers.replicas}
    if any(stage.sampler == POLICY for stages in levels_of(cfg) for stage in stages):
        velocity(POLICY, *rollout)
    for name in {REFERENCE, cfg.old_velocity}:
        velocity(name, *training)
    if trains:
        with torch.enable_grad():
            policy.guided_velocity(samplers.transformer, *training).square().mean().backward()
        samplers.transformer.zero_grad()
    graphs = []
    for _ in range(2):
        samplers.sync()
        for call in calls.values():
            call()
        graphs.append(len(compiler.graphs))
    named = ", ".join([*([POLICY] if trains else []), REFERENCE, *samplers.replicas])
    what = f"{named} in batches of {' and '.join(str(len(x)) for x, *_ in (rollout, training))}"
    yield judge_compilation(graphs[0], graphs[1] - graphs[0], compiler.backend, what)
    if shadow is not None:
        seconds = least_seconds(calls, device)
        speed = judge_speed("blocks", shadow, seconds[SHADOW], seconds[MERGED], compiled)
        yield speed._replace(found=f"{len(rollout[0])} images through {_BLOCKS} of each kind in {speed.found}")


def judge_compilation(graphs: int, again: int, compiler: str, what: str) -> Row:
    made = f"{graphs} graphs of the blocks of {what}, by torch.compile's {compiler}"
    found = f"{made}; {again} more after a refresh of the weights"
    way_out = "family.compile=false, and a report of this with doctor.json" if again else ""
    measured = {"graphs": graphs, "recompilations": again, "backend": compiler}
    return Row("compilation", WRONG if again else OK, found, way_out, measured)
