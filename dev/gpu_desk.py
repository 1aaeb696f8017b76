"""Compile blocks of the models for GPUs that are not here, and check the code that Inductor generates.

    python dev/gpu_desk.py                                   # `make gpu-desk`: all rows
    python dev/gpu_desk.py flux1:nvfp4:10.0 sana:train:9.0   # <model>:<precision of the shadow>:<compute capability>

Blocks have the model's real width, and are a few of each kind. The shadow computes a batch of the rollout, or with
``train`` the trained model a micro-batch with its backward pass, twice. No kernel runs, and attention is by one kernel
whatever the card would choose. A failure ends with status 1.
"""

import absent_gpu  # first: it stands in for a GPU

# isort: split
import re
import sys
import time
from math import prod

import torch
from hydra.utils import get_class

from solrl_lightning.build import build_transformers
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.names import SHADOW
from solrl_lightning.options.run import Run
from solrl_lightning.policies.architectures import find_architecture
from solrl_lightning.quantization import nvfp4_kernel, nvfp4_packed, resolve
from solrl_lightning.quantization.backends import Hardware
from solrl_lightning.sizing.blocks import short_model

CARDS = {"8.0": "int8", "8.9": "fp8", "9.0": "fp8", "10.0": "nvfp4", "12.0": "nvfp4"}
MODELS = ("flux1", "sd3", "sana", "wan", "z_image", "flux2", "qwen_image")
TRAINING = "train"
ROWS = [f"{model}:{precision}:{capability}" for capability, precision in CARDS.items() for model in MODELS]
ROWS += [f"{model}:{TRAINING}:9.0" for model in MODELS]
_PRODUCTS = {"nvfp4": "_scaled_mm", "fp8": "_scaled_mm", "int8": "_int_mm"}
_FLOAT32 = ("sana", "wan", "z_image", "qwen_image")  # diffusers' linear attention, modulation, and complex rotations


def check(row: str) -> str:
    """Return what the code of a row has; raises AssertionError if it is not as it should be."""
    model, precision, version = row.split(":")
    major, minor = map(int, version.split("."))
    absent_gpu.use((major, minor))
    absent_gpu.codes.clear()
    torch._dynamo.reset()
    _run(model, precision, Hardware("absent", capability=(major, minor)))
    code = "\n".join(line for graph in absent_gpu.codes for line in graph.splitlines() if not line.startswith("#"))
    kernels = re.findall(r"aten\._scaled_dot_product_\w+\.default\(", code)
    assert kernels, "attention is not one kernel"
    sizes = {dtype: _largest(code, dtype) for dtype in ("bfloat16", "float32")}
    if precision == TRAINING:
        backward = sum("_backward" in kernel for kernel in kernels)
        assert backward == len(kernels) / 2, f"{backward} of {len(kernels)} kernels of attention are backward"
        assert model in _FLOAT32 or sizes["float32"] <= sizes["bfloat16"] / 2, f"{sizes['float32']} values in float32"
        return f"{len(absent_gpu.codes)} graphs, {backward} kernels of attention's backward pass"
    products = len(re.findall(rf"(?:extern_kernels\.|ops\.aten\.){_PRODUCTS[precision]}[.(]", code))
    assert products, "no product in the precision"
    encodings = re.findall(r"encode_row_\d+\.run\(", code)
    if precision == "nvfp4":
        assert len(encodings) <= products - 2 * len(absent_gpu.codes), "q, k and v quantise their input more than once"
    if model not in _FLOAT32 and precision != "int8":  # whose sums are scaled in float32, and normalised unrounded
        assert sizes["float32"] < sizes["bfloat16"] / 8, f"an activation of {sizes['float32']} values in float32"
    return f"{len(absent_gpu.codes)} graphs, {products} products, {len(encodings)} encodings by Triton"


def _largest(code: str, dtype: str) -> int:
    shapes = re.findall(rf"empty_strided_cuda\(\(([\d, ]+)\), \([\d, ]+\), torch\.{dtype}\)", code)
    return max((prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes), default=0)


def _run(architecture: str, precision: str, hardware: Hardware) -> None:
    """Compute a velocity by the shadow, or by the trained model with its gradients, twice."""
    trains = precision == TRAINING
    options = ["precision=bf16", "family=prefix"] if trains else [f"precision={precision}", "family=sol_rl"]
    arguments = f"model={architecture} model.weights=random data=shapes reward=shapes".split()
    with ConfigTree() as tree:
        run = Run.of(application_config(tree.compose((*arguments, *options)), "outputs"))
    with torch.set_grad_enabled(trains):
        pipeline = get_class(run.model.policy["_target_"]).pipeline_class
        model = short_model(run, find_architecture(run.model.pretrained, pipeline), torch.device("meta"))
        with torch.device("meta"):  # without it, PEFT creates the adapters on the CPU
            transformers = build_transformers(
                run.model,
                run.seed,
                model,
                compile_replicas=True,
                compile_policy=trains,
                with_shadow=not trains,
                backend=resolve(run.precision.name, "auto" if trains else "torch", hardware),
                compiler=absent_gpu.compiler,
            )
        batch = run.model.micro_batch if trains else run.model.rollout_batch
        with torch.no_grad():
            conditioning = model.encode(batch * [Prompt("")])
        x, sigma = torch.empty(batch, *model.latent_shape, device="meta"), torch.empty(batch, device="meta")
        graphs = []
        for _ in range(2):
            if trains:
                with transformers.trained.current() as transformer:
                    model.guided_velocity(transformer, x, sigma, conditioning).square().mean().backward()
            else:
                model.guided_velocity(transformers.replicas[SHADOW], x, sigma, conditioning)
            graphs.append(len(absent_gpu.codes))
    assert graphs[0] == graphs[1], f"{graphs[1] - graphs[0]} graphs of the second pass"


def main(rows: list[str]) -> int:
    nvfp4_packed.encoder = lambda device: nvfp4_kernel.encode_rows  # type: ignore[attr-defined]  # as on a GPU
    failures = 0
    for row in rows:
        started = time.perf_counter()
        try:
            result = check(row)
        except Exception as error:
            failures += 1
            result = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0]}"
        print(f"{row:20} {time.perf_counter() - started:4.0f} s  {result}", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ROWS))
