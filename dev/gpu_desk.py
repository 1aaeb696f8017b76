"""Compile blocks of the models for GPUs that are not here, and check the code that Inductor generates.

    python dev/gpu_desk.py                                   # `make gpu-desk`: all rows
    python dev/gpu_desk.py flux1:nvfp4:10.0 sana:fp8:9.0     # <model>:<precision>:<compute capability>

Blocks have the model's real width, and are a few of each kind; the shadow computes a batch of the rollout, twice. No
kernel runs, attention is by one kernel whatever the card would choose, and there is no backward pass, because autograd
asks the driver. A failure ends with status 1.
"""

import absent_gpu  # first: it stands in for a GPU

# isort: split
import re
import sys
import time
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hydra.utils import get_class, instantiate

from solrl_lightning.build import quantization_rule, trained_as
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.names import SHADOW
from solrl_lightning.options.run import Run
from solrl_lightning.policies import random_weights
from solrl_lightning.policies.architectures import find_architecture
from solrl_lightning.quantization import resolve
from solrl_lightning.quantization.backends import Hardware
from solrl_lightning.sizing.blocks import write_short
from solrl_lightning.sizing.plan import without_files
from solrl_lightning.training.transformers import replicate

CARDS = {"8.0": "int8", "8.9": "fp8", "9.0": "fp8", "10.0": "nvfp4", "12.0": "nvfp4"}
MODELS = ("flux1", "sd3", "sana", "wan", "z_image")
ROWS = [f"{model}:{precision}:{capability}" for capability, precision in CARDS.items() for model in MODELS]
_PRODUCTS = {"nvfp4": "_scaled_mm", "fp8": "_scaled_mm", "int8": "_int_mm"}
_FLOAT32 = ("sana", "wan", "z_image")  # diffusers' linear attention, modulation, and complex rotation are in float32


def check(row: str) -> str:
    """Return what the code of a row has; raises AssertionError if it is not as it should be."""
    model, precision, capability = row.split(":")
    absent_gpu.use(tuple(map(int, capability.split("."))))
    absent_gpu.codes.clear()
    torch._dynamo.reset()
    _run(model, precision, Hardware("absent", capability=tuple(map(int, capability.split(".")))))
    code = "\n".join(line for graph in absent_gpu.codes for line in graph.splitlines() if not line.startswith("#"))
    products = len(re.findall(rf"(?:extern_kernels\.|ops\.aten\.){_PRODUCTS[precision]}[.(]", code))
    assert products, "no product in the precision"
    assert re.search(r"aten\._scaled_dot_product_\w+\.default\(", code), "attention is not one kernel"
    encodings = re.findall(r"encode_row_\d+\.run\(", code)
    if precision == "nvfp4":
        assert len(encodings) <= products - 2 * len(absent_gpu.codes), "q, k and v quantise their input more than once"
    sizes = {dtype: _largest(code, dtype) for dtype in ("bfloat16", "float32")}
    if model not in _FLOAT32 and precision != "int8":  # whose sums are scaled in float32, and normalised unrounded
        assert sizes["float32"] < sizes["bfloat16"] / 8, f"an activation of {sizes['float32']} values in float32"
    return f"{len(absent_gpu.codes)} graphs, {products} products, {len(encodings)} encodings by Triton"


def _largest(code: str, dtype: str) -> int:
    shapes = re.findall(rf"empty_strided_cuda\(\(([\d, ]+)\), \([\d, ]+\), torch\.{dtype}\)", code)
    return max((prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes), default=0)


def _run(model: str, precision: str, hardware: Hardware) -> None:
    """Compute a velocity by the shadow, twice; the second time compiles nothing."""
    arguments = f"model={model} model.weights=random data=shapes reward=shapes family=sol_rl precision={precision}"
    with ConfigTree() as tree:
        run = Run.of(application_config(tree.compose(tuple(arguments.split())), "outputs"))
    with absent_gpu.FakeGPU(allow_non_fake_inputs=True), TemporaryDirectory() as folder, torch.no_grad():
        pipeline = get_class(run.model.policy["_target_"]).pipeline_class
        write_short(find_architecture(run.model.pretrained, pipeline), Path(folder))
        policy = instantiate(without_files(run).model.policy, pretrained=folder, weights="random", device="cuda:0")
        replicas = replicate(
            policy,
            trained_as(run),
            run.model.rollout_batch,
            compile_replicas=True,
            compile_policy=False,
            with_shadow=True,
            backend=resolve(precision, "torch", hardware),
            rule=quantization_rule(run),
            compiler=absent_gpu.compiler,
        ).replicas
        batch = run.model.rollout_batch
        conditioning = policy.encode(batch * [Prompt("")])
        x, sigma = torch.empty(batch, *policy.latent_shape, device="cuda"), torch.empty(batch, device="cuda:0")
        graphs = []
        for _ in range(2):
            policy.guided_velocity(replicas[SHADOW], x, sigma, conditioning)
            graphs.append(len(absent_gpu.codes))
    assert graphs[0] == graphs[1], f"{graphs[1] - graphs[0]} graphs of the second pass"


def main(rows: list[str]) -> int:
    random_weights.init_random_weights = lambda *_: None
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
