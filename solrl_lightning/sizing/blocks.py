"""Rows of task=doctor that compile a few blocks of the model's real size."""

import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor, nn

from solrl_lightning.artifacts.tables import Row, judged
from solrl_lightning.build import build_transformers
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.machine.attention import without_gradients
from solrl_lightning.names import MERGED, OLD, POLICY, REFERENCE, SHADOW
from solrl_lightning.options.run import Run
from solrl_lightning.policies.architectures import Architecture
from solrl_lightning.policies.compilation import should_compile
from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.quantization import Backend, resolve
from solrl_lightning.sizing.layers import judge_speed
from solrl_lightning.sizing.plan import Plan, without_files
from solrl_lightning.sizing.timing import least_seconds
from solrl_lightning.training.transformers import TrainedTransformer, VelocityModel, as_it_is

_BLOCKS = 2  # of each kind
_GRADIENT_ERROR = 0.1  # tolerated difference of gradients, of their norm
_CPU_PRODUCTS = 2 * 10**8  # of the whole model's linear layers; sets the batch of the blocks on a CPU


def short_model(cfg: Run, architecture: Architecture, device: torch.device) -> PipelineAdapter:
    """Return the run's model with a few blocks of each kind, of random weights."""
    with TemporaryDirectory() as folder:
        write_short(architecture, Path(folder))
        options = dict(pretrained=folder, weights="random", device=str(device))
        model: PipelineAdapter = instantiate(without_files(cfg).model.policy, **options)
    return model


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
            counts = {"num_layers", "num_single_layers", "n_layers"} & config.keys()
            short |= {key: min(_BLOCKS, config[key]) for key in counts}
            if dual:
                short |= {"dual_attention_layers": dual, "num_layers": _BLOCKS + len(dual)}
        file = folder / name / ("scheduler_config.json" if name == "scheduler" else "config.json")
        file.parent.mkdir()
        file.write_text(json.dumps(short))
        index[name] = [library, cls]
    (folder / "model_index.json").write_text(json.dumps(index))


def check_gradients(velocity: Callable[[nn.Module], Tensor], trained: TrainedTransformer) -> Row:
    """Return the row on the gradients of a compiled transformer against its eager gradients."""

    def gradients() -> Tensor:
        with torch.enable_grad(), trained.current() as transformer:
            velocity(transformer).square().mean().backward()
        flat = torch.cat([p.grad.flatten().float() for p in trained.weights.parameters() if p.grad is not None])
        trained.weights.zero_grad()
        return flat

    compiled = gradients()
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.12 warns that nothing is compiled
        eager = gradients()
    error = (torch.linalg.vector_norm(compiled - eager) / torch.linalg.vector_norm(eager)).item()
    return judged(
        "gradients",
        f"of compiled training: {error:.1e} of their norm from the eager gradients",
        "compile_training=false, and a report of this with doctor.json",
        {"error": error},
        f"at most {_GRADIENT_ERROR:g}: both have the rounding of BF16",
        wrong=not error <= _GRADIENT_ERROR,
    )


@torch.no_grad()
def check_blocks(cfg: Run, run: Plan, shadow: Backend | None, device: torch.device, compiled: bool) -> Iterator[Row]:
    """Compile a few blocks of all samplers for both batch sizes, requantise, time the replicas, and yield the rows."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second to import

    model = short_model(cfg, run.architecture, device)
    torch.compiler.reset()
    compiler = CompileCounterWithBackend("inductor" if compiled else "eager")
    trains, _ = should_compile("compile_training", "training steps", cfg.compile_training, device)
    transformers = build_transformers(
        cfg.model,
        cfg.seed,
        model,
        compile_replicas=True,
        compile_policy=trains,
        with_shadow=shadow is not None,
        backend=shadow or resolve("bf16", "auto", device),
        compiler=compiler,
    )

    products = sum(run.passes.tokens.get(p.name, 0) * p.in_features * p.out_features for p in run.layers)  # of an image

    def inputs(most: int) -> tuple[Tensor, Tensor, Conditioning]:
        batch = most if device.type == "cuda" else max(1, min(most, _CPU_PRODUCTS // products))
        conditioning = model.encode(batch * [Prompt("")])
        return model.noise(torch.arange(batch)), torch.full((batch,), 0.5, device=device), conditioning

    def velocity(transformer_of: VelocityModel, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        with transformer_of() as transformer:
            return model.guided_velocity(transformer, x, sigma, conditioning)

    def sampled(transformer_of: VelocityModel) -> Tensor:
        with without_gradients(device):
            return velocity(transformer_of, *rollout)

    rollout, training = inputs(cfg.model.rollout_batch), inputs(cfg.model.micro_batch)
    replicas = {name: as_it_is(module) for name, module in transformers.replicas.items()}
    calls = {name: partial(sampled, replica) for name, replica in replicas.items()}
    if POLICY in cfg.samplers:
        sampled(transformers.trained.old)
    for velocity_model in transformers.velocity_models.values():
        velocity(velocity_model, *training)
    if trains:
        yield check_gradients(lambda transformer: model.guided_velocity(transformer, *training), transformers.trained)
    graphs = []
    for _ in range(2):
        for sampler in transformers.samplers.values():
            sampler.sync(transformers.trained.state(OLD), version=0)
        for call in calls.values():
            call()
        graphs.append(len(compiler.graphs))
    names = ", ".join([*([POLICY] if trains else []), REFERENCE, *replicas])
    what = f"{names} in batches of {' and '.join(str(len(x)) for x, *_ in (rollout, training))}"
    again = graphs[1] - graphs[0]
    yield judged(
        "compilation",
        f"{graphs[0]} graphs of the blocks of {what}, by torch.compile's {compiler.backend}; {again} more after "
        "requantising",
        "family.compile=false, and a report of this with doctor.json",
        {"graphs": graphs[0], "recompilations": again, "backend": compiler.backend},
        "0 more: a refresh writes in place",
        wrong=again > 0,
    )
    if shadow is not None:
        seconds = least_seconds(calls, device)
        speed = judge_speed("blocks", shadow, seconds[SHADOW], seconds[MERGED], compiled)
        yield speed._replace(result=f"{len(rollout[0])} images through {_BLOCKS} of each kind in {speed.result}")
