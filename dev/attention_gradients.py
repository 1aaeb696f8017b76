"""Compare the LoRA's gradients with and without cuDNN's attention, eager and compiled, on a GPU.

    python dev/attention_gradients.py tiny   # a model of conf/model

A few blocks of the model with random weights compute a micro-batch, and the mean square of its velocity is
differentiated: the LoRA's B is 0, as at the start of a run, then random. A row has the norm of the gradient, its
distance from the eager one without cuDNN, relative to that norm, and the tensors in which it is not finite.
"""

import sys
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from solrl_lightning.build import build_transformers, prepare_device
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.options.run import Run
from solrl_lightning.quantization import resolve
from solrl_lightning.sizing.blocks import short_model
from solrl_lightning.sizing.plan import plan_run, without_files

GPU = torch.device("cuda", 0)
OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def compare(model_name: str) -> None:
    arguments = f"model={model_name} family=compile precision=bf16 model.weights=random data=shapes reward=shapes"
    with ConfigTree() as tree:
        run = Run.of(application_config(tree.compose(tuple(arguments.split())), "outputs"))
    backend = resolve("bf16", "auto", GPU)
    model = short_model(run, plan_run(without_files(run), backend).architecture, GPU)
    how = dict(compile_replicas=False, compile_policy=True, with_shadow=False, backend=backend)
    trained = build_transformers(run.model, run.seed, model, **how).trained
    batch = run.model.micro_batch
    x, sigma = model.noise(torch.arange(batch)), torch.full((batch,), 0.5, device=GPU)
    conditioning = model.encode(batch * [Prompt("")])
    weights = {name: p for name, p in trained.weights.named_parameters() if p.requires_grad}

    def gradients() -> list[Tensor]:
        with trained.current() as transformer:
            loss = model.guided_velocity(transformer, x, sigma, conditioning).square().mean()
            return list(torch.autograd.grad(loss, list(weights.values())))

    for b in ("0", "random"):
        if b == "random":
            for name, weight in weights.items():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.01)
        reference = None
        for kernels in (OTHERS, [SDPBackend.CUDNN_ATTENTION]):
            torch.compiler.reset()
            for mode in ("eager", "compiled"):
                stance = torch.compiler.set_stance("force_eager") if mode == "eager" else nullcontext()
                with stance, sdpa_kernel(kernels):
                    parts = gradients()
                flat = torch.cat([part.flatten() for part in parts])
                reference = flat if reference is None else reference
                wrong = [name for name, part in zip(weights, parts, strict=True) if not part.isfinite().all()]
                error = (torch.linalg.vector_norm(flat - reference) / torch.linalg.vector_norm(reference)).item()
                names = ", ".join(kernel.name for kernel in kernels)
                print(f"B {b}, {names}, {mode}: norm {flat.norm().item():.4g}, error {error:.1e}, not finite: {wrong}")


if __name__ == "__main__":
    prepare_device(GPU)
    compare(sys.argv[1])
