"""task=benchmark: seconds of a forward pass and of a family's iteration.

Two measurements, each after a warm-up, in one process, so that their ratios are comparable:

1. forward    one forward pass of the transformer, BF16 and shadow, eager and compiled, alternating, and the
              measured peak rate of matrix products on this device
2. families   iterations of real training, family by family and stage by stage, and the memory that they take

With ``model.weights=random`` all of it runs at a model's real size without a file; time does not depend on the numbers.
"""

import platform
from pathlib import Path
from typing import Any

import torch

from solrl_lightning.artifacts.tables import format_table, write_json
from solrl_lightning.build import device_of
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Benchmark
from solrl_lightning.sizing.benchmark import (
    FORWARDS,
    ROLLOUT,
    family_configs,
    forward_times,
    times_of_families,
    with_speedups,
)
from solrl_lightning.training.stopwatch import STOPWATCH_STAGES


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
    result["families"] = with_speedups(times_of_families(families, task.rounds, device))
    print(format_families(result["families"], task.rounds * task.repeats), flush=True)
    path = Path(cfg.run_dir) / "benchmark.json"
    write_json(path, result)
    print(f"  {path}", flush=True)
    return result


def format_forward(result: dict[str, Any]) -> str:
    rows = []
    for name, seconds in result["seconds"].items():
        times = [f"{1000 * seconds:.1f}", f"{result['ratios'][name]:.2f}", f"{result['batch'] / seconds:.1f}"]
        rates = [f"{result['tflops'][name]:.3g}", f"{100 * result['share_of_peak'][name]:.0f} %"]
        rows.append([name, *times, *rates])
    shadow, peak = result["precision_backend"], result["peak"]
    title = (
        f"a forward pass of {result['batch']} candidates, {result['flops'] / 1e12:.3g} TFLOPs, median of {FORWARDS}; "
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
        f"seconds per iteration, median of {repeats}; rollout is {' + '.join(ROLLOUT)}; warm-up is the iteration "
        f"before, which compiles where rollouts are compiled\n{format_table(columns, seconds)}\n"
        "candidates per second of the rollout; times faster than; requantising as a share of the iteration; peak "
        f"memory of {memory} in GB (10^9)\n"
        f"{format_table(['family', 'images/s', *against, 'requantize', 'memory'], rates)}"
    )
