"""What a rank of test_sharded_full does: the same steps with whole weights, as DDP has them, and with shards."""

import os
from pathlib import Path
from typing import Any

import torch
from nano import PROMPTS, load_nano, prompts_of
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from solrl_lightning.policies.checkpointing import blocks_of
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.training.full import FullTransformer
from solrl_lightning.training.sharded_full import ShardedFullTransformer
from solrl_lightning.training.shards import gather, shard_like


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def elements(tensors: Any) -> int:
    """Numbers that this rank holds."""
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel() for tensor in tensors)


def steps(model: PipelineAdapter, trained: FullTransformer) -> dict[str, Any]:
    """Two optimiser steps, of one and of two micro-batches, that differ between the ranks."""
    rank = distributed.get_rank()
    x, sigma = model.noise(torch.tensor([rank, 2 + rank])), torch.tensor([0.5, 0.7])
    prompts = model.encode(prompts_of(PROMPTS[:2]))
    parameters = [parameter for parameter in trained.weights.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    results: dict[str, Any] = {}

    def velocity(name: str, state: Any = None) -> None:
        with torch.no_grad(), trained.old(state) as transformer:
            results[name] = model.velocity(transformer, x, sigma, prompts)

    velocity("old velocity")
    velocity("base velocity", trained.state("base"))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    with trained.current() as transformer:
        hook = blocks_of(transformer)[0].register_forward_pre_hook(count)
    for step in (1, 2):
        optimizer.zero_grad()
        for size in range(1, step + 1):
            with trained.current() as transformer:
                y = model.velocity(transformer, size * x, sigma, prompts)
            results.setdefault("first velocity", y.detach())
            (y - 1).square().mean().backward()
        if not isinstance(parameters[0], DTensor):
            for parameter in parameters:
                if parameter.grad is not None:
                    distributed.all_reduce(parameter.grad.div_(2))
        gradients = [whole(parameter.grad).flatten() for parameter in parameters if parameter.grad is not None]
        results[f"gradient {step}"] = torch.cat(gradients)
        results[f"norm {step}"] = whole(torch.nn.utils.clip_grad_norm_(parameters, 0.1))
        optimizer.step()
    hook.remove()
    results["forward passes of a block"] = calls
    trained.update_old(0.3)
    for name in ("default", "old", "base"):
        results[name] = torch.cat([whole(value).flatten().float() for value in trained.state(name).values()])
    results |= trained.distances()
    velocity("velocity of the trained weights", trained.state("default"))
    velocity("old velocity afterwards")
    parts: dict[str, Any] = {name: trained.state(name).values() for name in ("default", "old", "base")}
    parts |= {"moments": [state["exp_avg"] for state in optimizer.state.values()]}
    parts |= {"computing": trained.transformer.parameters()}
    results |= {f"{name} held": elements(tensors) for name, tensors in parts.items()}
    return results


def compare(arguments: list[str]) -> int:
    """A target of `Forks`: saves the results of each <architecture>:<dtype>:<pipeline folder>[:checkpointed]."""
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    mesh = init_device_mesh("cpu", (2,))
    results = {}
    for argument in arguments:
        architecture, dtype, folder, *checkpointed = argument.split(":")
        options = dict(dtypes={"transformer": dtype, "default": "float32"}, gradient_checkpointing=bool(checkpointed))
        for kind in (FullTransformer, ShardedFullTransformer):
            torch.manual_seed(0)
            model = load_nano(architecture, folder, **options)
            trained = kind(model.transformer)
            if isinstance(trained, ShardedFullTransformer):
                trained.shard(mesh)
            results[" ".join([architecture, dtype, *checkpointed, kind.__name__])] = steps(model, trained)
    odd = torch.arange(15.0).view(5, 3)  # one rank has a row more
    shard = shard_like(odd, next(iter(trained.state("old").values())))
    results["shard"], results["gathered"] = shard.to_local(), gather({"odd": [shard], "name": "a"})  # type: ignore[attr-defined]
    torch.save(results, Path(f"rank{rank}.pt"))
    distributed.destroy_process_group()
    return 0
