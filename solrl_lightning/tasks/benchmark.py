"""task=benchmark: seconds of a forward pass and of a family's iteration.

Two measurements, each after a warm-up, in one process, so that their ratios are comparable:

1. forward    one forward pass of the transformer, BF16 and shadow, eager and compiled, alternating, and the
              measured peak rate of matrix products on this device
2. families   iterations of real training, family by family and stage by stage, and the memory that they take

With ``model.weights=random`` all of it runs at a model's real size without a file; time does not depend on the numbers.
"""

import platform
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from solrl_lightning.artifacts.tables import format_table, write_json
from solrl_lightning.build import build_model, device_of, with_option
from solrl_lightning.machine.attention import without_gradients
from solrl_lightning.names import SHADOW, Decoder
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Benchmark
from solrl_lightning.policies import replica
from solrl_lightning.policies.compilation import can_compile, compile_blocks, should_compile
from solrl_lightning.quantization.scaled_linear import operand_dtype
from solrl_lightning.run_prompts import prompt_sets
from solrl_lightning.sizing.timing import Lap, alternate, peak_since_release, release, run_iterations
from solrl_lightning.training.stopwatch import STOPWATCH_STAGES

_WARM_UP, _FORWARDS = 3, 20  # forward passes of each variant; the first compiles
_PRODUCTS = 10  # timed matrix products, after _WARM_UP others
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}  # rows and columns: large enough for the units, small enough for the time
_ROLLOUT = STOPWATCH_STAGES[:-1]  # without training
_BASELINES = ("naive_scaling", "compile")


def benchmark(cfg: Run) -> dict[str, Any]:
    """Run both measurements, write benchmark.json and print the tables."""
    task = cfg.task_as(Benchmark)
    device = device_of(cfg.trainer)
    families = family_configs(cfg, device)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": cfg.model.pretrained,
        "weights": cfg.model.weights,
        "resolution": cfg.model.resolution,
    }
    result["forward"] = forward_times(cfg, device)
    print(format_forward(result["forward"]), flush=True)
    result["families"] = times_of_families(families, task.rounds, device)
    print(format_families(result["families"], task.rounds * task.repeats), flush=True)
    path = Path(cfg.run_dir) / "benchmark.json"
    write_json(path, result)
    print(f"  {path}", flush=True)
    return result


def family_configs(cfg: Run, device: torch.device) -> dict[str, Run]:
    """Return the configuration of every row; named by family, precision and decoder."""
    task, configs = cfg.task_as(Benchmark), {}
    sizes = {key: size for key, size in task.sizes if size is not None}
    for family in task.families:
        run = with_option(cfg, "family", family, configured=True, **sizes)
        if run.family.compile == "auto":  # eager products are not to be compared with the family compile's
            run.family.compile = task.compile and can_compile(device)
        run = Run.of_tree(run.tree())
        precisions: Sequence[str | None] = (SHADOW in run.samplers and task.precisions) or [None]
        decoders: Sequence[Decoder | None] = (run.family.explore is not None and task.decoders) or [None]
        for precision, decoder in product(precisions, decoders):
            row = run.model_copy(deep=True) if precision is None else with_option(run, "precision", precision, True)
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
    with without_gradients(device):
        seconds = alternate(calls, device, _WARM_UP + _FORWARDS)
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
    """Measure the times of each row, and its speedup over each baseline.

    Alternates the order, so that slow drift affects all rows equally.
    """
    runs: dict[str, list[list[Lap]]] = {name: [] for name in families}
    memory: dict[str, Any] = {}
    for number in range(rounds):
        for name in list(families)[:: -1 if number % 2 else 1]:
            runs[name].append(run_iterations(families[name], device))
            memory[name] = peak_since_release(device)
    times = {name: family_times(cfg, runs[name], memory[name], device) for name, cfg in families.items()}
    for row in times.values():
        row["speedup"] = {
            baseline: {span: times[baseline][span] / row[span] for span in ("rollout", "iteration")}
            for baseline in _BASELINES
            if baseline in times
        }
    return times


def family_times(cfg: Run, runs: list[list[Lap]], memory: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the median seconds of an iteration of ``cfg.family`` and of its stages, 0 for a stage that it lacks."""
    laps = [lap for _, *timed in runs for lap in timed]
    stages = {name: median(lap[name] for lap in laps) for name in (*STOPWATCH_STAGES, "iteration")}
    rollout = median(sum(lap[stage] for stage in _ROLLOUT) for lap in laps)
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


def format_forward(result: dict[str, Any]) -> str:
    rows = []
    for name, seconds in result["seconds"].items():
        times = [f"{1000 * seconds:.1f}", f"{result['ratios'][name]:.2f}", f"{result['batch'] / seconds:.1f}"]
        rates = [f"{result['tflops'][name]:.3g}", f"{100 * result['share_of_peak'][name]:.0f} %"]
        rows.append([name, *times, *rates])
    shadow, peak = result["precision_backend"], result["peak"]
    title = (
        f"a forward pass of {result['batch']} candidates, {result['flops'] / 1e12:.3g} TFLOPs, median of {_FORWARDS}; "
        f"the shadow is {shadow}.\nThe peak is {peak['tflops']:.3g} TFLOP/s, of a product of two {peak['dtype']} "
        f"matrices of {peak['size']} x {peak['size']}"
    )
    columns = ["transformer", "ms", "x " + result["against"], "images/s", "TFLOP/s", "of the peak"]
    return f"{title}\n{format_table(columns, rows)}"


def format_families(families: dict[str, dict[str, Any]], repeats: int) -> str:
    first = next(iter(families.values()))
    baselines, memory = list(first["speedup"]), first["peak_memory"]["of"]
    ratios = [(span, b) for span in ("rollout", "iteration") for b in baselines]
    seconds, rates = [], []
    for name, times in families.items():
        spans = [f"{times[column]:.3g}" for column in (*STOPWATCH_STAGES, "rollout", "iteration", "warm_up")]
        seconds.append([name, f"{times['keep']}-in-{times['pool']}", "yes" if times["compiled"] else "no", *spans])
        speedups = [f"{times['speedup'][b][span]:.2f}" for span, b in ratios]
        shares = [f"{100 * times['requantize_share']:.2f} %", f"{times['peak_memory']['bytes'] / 1e9:.2f}"]
        rates.append([name, f"{times['images_per_second']:.3g}", *speedups, *shares])
    columns = ["family", "kept", "compiled", *STOPWATCH_STAGES, "rollout", "iteration", "warm-up"]
    against = [f"{span} x {b}" for span, b in ratios]
    return (
        f"seconds per iteration, median of {repeats}; rollout is {' + '.join(_ROLLOUT)}; warm-up is the iteration "
        f"before, which compiles where rollouts are compiled\n{format_table(columns, seconds)}\n"
        "candidates per second of the rollout; times faster than; requantising as a share of the iteration; peak "
        f"memory of {memory} in GB (10^9)\n"
        f"{format_table(['family', 'images/s', *against, 'requantize', 'memory'], rates)}"
    )
