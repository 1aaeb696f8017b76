"""A LoRA that is part of the base model, such as the one that distils Qwen-Image to few steps."""

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from solrl_lightning.artifacts.hub import fetch
from solrl_lightning.names import LORA_FILES, PEFT_CONFIG
from solrl_lightning.policies.lora_files import read_lora_file


@torch.no_grad()
def fuse_lora(pipeline: DiffusionPipeline, source: str) -> dict[str, Tensor]:
    """Add a LoRA to the transformer's weights, in place: W + alpha / rank B A in float32, rounded to the dtype of W.

    Return its tensors, with the scale in B.

    Args:
        pipeline: reads the names of its own LoRA files, and of other trainers where diffusers converts them.
        source: ``<hub id or folder>/<file>``.

    Raises:
        UserError: the file cannot be read, or is no LoRA of the transformer (`read_lora_file`).
    """
    folder, _, name = source.rpartition("/")
    file = fetch(folder or ".", name, key="model.fused_lora", kind="LoRA")
    if name == LORA_FILES[1]:
        fetch(folder or ".", PEFT_CONFIG, key="model.fused_lora", kind="LoRA")
    named = f"model.fused_lora={source} is invalid"
    state = read_lora_file(file, pipeline.transformer, type(pipeline), named)
    for key in [key for key in state if key.endswith(".lora_A.weight")]:
        layer = key.removesuffix(".lora_A.weight")
        weight = pipeline.transformer.get_submodule(layer).weight
        update = state[f"{layer}.lora_B.weight"].flatten(1) @ state[key].flatten(1)
        weight.copy_(weight.float() + update.view_as(weight))
    return state
