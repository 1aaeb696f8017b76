"""Measurements of task=benchmark: forward passes of the transformer, and iterations of training by family."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from solrl_lightning.build import build_model, with_option
from solrl_lightning.names import SHADOW, Decoder
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Benchmark
from solrl_lightning.policies import replica
from solrl_lightning.policies.compilation import can_compile, compile_blocks, should_compile
from solrl_lightning.quantization.scaled_linear import operand_dtype
from solrl_lightning.run_prompts import prompt_sets
from solrl_lightning.sizing.timing import Lap, alternate, peak_since_release, release, run_iterations
from solrl_lightning.training.stopwatch import STOPWATCH_STAGES

_WARM_UP, FORWARDS = 3, 20  # forward passes of each variant; the first compiles
_PRODUCTS = 10  # timed matrix products, after _WARM_UP others
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}  # rows and columns: large enough for the units, small enough for the time
ROLLOUT = STOPWATCH_STAGES[:-1]  # without training
_BASELINES = ("naive_scaling", "compile")


def family_configs(cfg: Run, device: torch.device) -> dict[str, Run]:
    """Return the configuration of every row; named by family, precision and decoder."""
    task, configs = cfg.task_as(Benchmark), {}
    for family in task.families:
        run = with_option(cfg, "family", family)
        run.family.pool = task.sizes.pool or run.family.pool
        run.family.keep = task.sizes.keep or run.family.keep
        if run.family.compile == "auto":  # eager products are not to be compared with the family compile's
            run.family.compile = task.compile and can_compile(device)
        run = Run.of_tree(run.tree())
        precisions: Sequence[str | None] = (SHADOW in run.samplers and task.precisions) or [None]
        decoders: Sequence[Decoder | None] = (run.family.explore is not None and task.decoders) or [None]
        for precision, decoder in product(precisions, decoders):
            row = run.model_copy(deep=True) if precision is None else with_option(run, "precision", precision)
            if decoder is not None and row.family.explore is not None:
                row.family.explore.decoder = decoder
                run.check_decoder("task.decoders", decoder)
            configs[" ".join(word for word in (family, precision, decoder) if word is not None)] = row
    return configs


@torch.no_grad()
def forward_times(cfg: Run, device: torch.device) -> dict[str, Any]:
    """Return the median seconds of a forward pass of ``model.rollout_batch`` candidates, by variant."""
    release(device)
    module = build_model(cfg, device, {SHADOW})
    module.requantize(version=0)
    originals = {"bf16": module.transformers.replicas["merged"], "shadow": module.transformers.replicas["shadow"]}
    shadow = module.transformers.shadow_backend
    assert shadow is not None, "a stage samples from it"
    clone = replica.clone_sharing_weights
    variants: dict[str, nn.Module] = {f"{name} eager": clone(transformer) for name, transformer in originals.items()}
    if cfg.task_as(Benchmark).compile and can_compile(device):
        for name, transformer in originals.items():
            compiled = clone(transformer)
            compile_blocks(compiled, fullgraph=name != "shadow" or shadow.fullgraph)
            variants[f"{name} compiled"] = compiled
    batch = cfg.model.rollout_batch
    _, conditioning = module.encode(prompt_sets(cfg).eval[:1]).gather(torch.zeros(batch, dtype=torch.int64))
    x, sigma = module.model.noise(torch.arange(batch)), torch.tensor(0.5, device=device)
    # torch 2.11 does not count the fused attention of a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module.model.velocity(variants["bf16 eager"], x, sigma, conditioning)
    flops, peak = counter.get_total_flops(), matmul_peak(device)
    calls = {
        name: partial(module.model.velocity, transformer, x, sigma, conditioning)
        for name, transformer in variants.items()
    }
    seconds = alternate(calls, device, _WARM_UP + FORWARDS)
    medians = {name: median(values[_WARM_UP:]) for name, values in seconds.items()}
    against = "bf16 compiled" if "bf16 compiled" in medians else "bf16 eager"
    tflops = {name: flops / value / 1e12 for name, value in medians.items()}
    return {
        "batch": batch,
        "precision_backend": module.transformers.precision_backend,
        "seconds": medians,
        "against": against,
        "ratios": {name: value / medians[against] for name, value in medians.items()},
        "flops": flops,
        "tflops": tflops,
        "peak": peak,
        "share_of_peak": {name: value / peak["tflops"] for name, value in tflops.items()},
    }


@torch.no_grad()
def matmul_peak(device: torch.device) -> dict[str, Any]:
    """Measure the rate of one large square product, in BF16 or, on a CPU without BF16 units, in FP32."""
    size, dtype = _PRODUCT_SIZE[device.type], operand_dtype(device)
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    seconds = alternate({"product": lambda: left @ right}, device, _WARM_UP + _PRODUCTS)["product"]
    tflops = 2 * size**3 / median(seconds[_WARM_UP:]) / 1e12
    return {"tflops": tflops, "size": size, "dtype": str(dtype).removeprefix("torch.")}


def times_of_families(families: dict[str, Run], rounds: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Measure the times of each row. Alternates the order, so that slow drift affects all rows equally."""
    runs: dict[str, list[list[Lap]]] = {name: [] for name in families}
    memory: dict[str, Any] = {}
    for number in range(rounds):
        for name in list(families)[:: -1 if number % 2 else 1]:
            runs[name].append(run_iterations(families[name], device))
            memory[name] = peak_since_release(device)
    return {name: family_times(cfg, runs[name], memory[name], device) for name, cfg in families.items()}


def family_times(cfg: Run, runs: list[list[Lap]], memory: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the median seconds of an iteration of ``cfg.family`` and of its stages, 0 for a stage that it lacks."""
    laps = [lap for _, *timed in runs for lap in timed]
    stages = {name: median(lap[name] for lap in laps) for name in (*STOPWATCH_STAGES, "iteration")}
    rollout = median(sum(lap[stage] for stage in ROLLOUT) for lap in laps)
    return {
        "pool": cfg.family.pool,
        "keep": cfg.family.keep,
        "compiled": should_compile("family.compile", "rollouts", cfg.family.compile, device)[0],
        **stages,
        "rollout": rollout,
        "images_per_second": cfg.prompts_per_iteration * cfg.family.pool / rollout,
        "requantize_share": stages["requantize"] / stages["iteration"],
        "warm_up": runs[0][0]["iteration"],
        "peak_memory": memory,
    }


def with_speedups(families: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return ``families`` with the speedup of the rollout and of the iteration over each baseline."""
    baselines = [name for name in _BASELINES if name in families]
    spans = ("rollout", "iteration")
    return {
        name: times | {"speedup": {b: {span: families[b][span] / times[span] for span in spans} for b in baselines}}
        for name, times in families.items()
    }
