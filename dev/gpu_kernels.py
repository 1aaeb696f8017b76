"""Time a GPU's products, quantisation and attention, and the kernels of a pass through a few blocks of a model.

    python dev/gpu_kernels.py flux1:12 sd3:12   # <model>:<images>

Prints medians of ten calls. Products have the shapes of layers of FLUX.1 and SD3.5: rows, inputs and outputs.
"""

import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from solrl_lightning.build import build_transformers, prepare_device
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.machine.attention import without_gradients
from solrl_lightning.names import MERGED, SHADOW
from solrl_lightning.options.run import Run
from solrl_lightning.quantization import resolve
from solrl_lightning.quantization.rowwise import E4M3, quantize_fp8
from solrl_lightning.sizing.blocks import short_model
from solrl_lightning.sizing.plan import plan_run, without_files
from solrl_lightning.training.transformers import as_it_is

GPU = torch.device("cuda", 0)
PRODUCTS = [(18432, 3072, 3072), (18432, 3072, 12288), (18432, 15360, 3072), (16384, 2432, 2432), (16384, 2432, 9728)]
ATTENTION = [(12, 24, 1536, 128), (24, 24, 1536, 128), (12, 38, 4301, 64)]  # images, heads, tokens, numbers of a head


def milliseconds(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def time_product(rows: int, inputs: int, outputs: int) -> str:
    x, w = (torch.randn(size, inputs, device=GPU, dtype=torch.bfloat16) for size in (rows, outputs))
    quantise = torch.compile(partial(quantize_fp8, dtype=E4M3), dynamic=False)
    (a, scale), (b, weight_scale) = quantise(x), quantize_fp8(w, E4M3)
    fp8 = partial(torch._scaled_mm, a, b.t(), scale, weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
    times = {"bf16": milliseconds(lambda: x @ w.t()), "fp8": milliseconds(fp8)}
    rates = [f"{name} {ms:.3f} ms, {2e-9 * rows * inputs * outputs / ms:.0f} TFLOP/s" for name, ms in times.items()]
    return f"{'; '.join(rates)}; quantising the input {milliseconds(lambda: quantise(x)):.3f} ms"


def time_attention(*shape: int) -> str:
    query, key, value = (torch.randn(shape, device=GPU, dtype=torch.bfloat16) for _ in range(3))
    times = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            ms = milliseconds(lambda: scaled_dot_product_attention(query, key, value))
        times.append(f"{backend.name} {ms:.3f} ms")
    return ", ".join(times)


def profile_blocks(model_name: str, images: int) -> None:
    arguments = f"model={model_name} family=sol_rl precision=fp8 model.weights=random data=shapes reward=shapes".split()
    with ConfigTree() as tree:
        run = Run.of(application_config(tree.compose((*arguments, f"model.rollout_batch={images}")), "outputs"))
    backend = resolve("fp8", "auto", GPU)
    model = short_model(run, plan_run(without_files(run), backend).architecture, GPU)
    transformers = build_transformers(
        run.model, run.seed, model, compile_replicas=True, compile_policy=False, with_shadow=True, backend=backend
    )
    inputs = model.noise(torch.arange(images)), torch.full((images,), 0.5, device=GPU)
    conditioning = model.encode(images * [Prompt("")])

    @torch.no_grad()
    def velocity(name: str) -> None:
        with without_gradients(GPU), as_it_is(transformers.replicas[name])() as transformer:
            model.guided_velocity(transformer, *inputs, conditioning)

    for name in (MERGED, SHADOW):
        seconds = milliseconds(partial(velocity, name))
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            velocity(name)
        kernels = sorted(recorded.key_averages(), key=lambda kernel: -kernel.device_time_total)
        print(f"{model_name}, {images} images, {name}: {seconds:.2f} ms")
        for kernel in kernels[:20]:
            print(f"  {kernel.device_time_total / 1e3:8.3f} ms {kernel.count:4d} x {kernel.key[:120]}")


if __name__ == "__main__":
    prepare_device(GPU)
    for product in PRODUCTS:
        print(product, time_product(*product))
    for shape in ATTENTION:
        print(shape, time_attention(*shape))
    for argument in sys.argv[1:]:
        profile_blocks(argument.partition(":")[0], int(argument.partition(":")[2]))
