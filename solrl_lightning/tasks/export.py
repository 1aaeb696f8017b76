"""task=export: saves a checkpoint's weights in the formats of diffusers, for use without this application.

Runs on the CPU for any trainer: export samples nothing, and the host usually has more memory.
"""

from pathlib import Path

import torch
from diffusers import ModelMixin
from omegaconf import DictConfig

from solrl_lightning.build import build_model, load_adapters
from solrl_lightning.files import written_whole
from solrl_lightning.tasks.generate import without_training

_LORAS = {"lora_ema": "ema", "lora_trained": "default"}
_MERGED = "transformer"


def export(cfg: DictConfig) -> None:
    """Write lora_ema/, lora_trained/ and transformer/ (the base with the merged average) into the run folder."""
    folder = Path(cfg.run_dir)
    module = build_model(without_training(cfg), torch.device("cpu"))
    load_adapters(module, cfg.ckpt)
    for name, weights in _LORAS.items():
        module.save_lora(folder / name, weights)
    with module.samplers.merged_with(module.adapter_state("ema")) as transformer:
        assert isinstance(transformer, ModelMixin)
        with written_whole(folder / _MERGED) as part:
            transformer.save_pretrained(part)  # shares the weights that LoRA does not adapt with the base
    name, dtype = type(transformer).__name__, str(transformer.dtype).removeprefix("torch.")
    print(
        f"pipe.load_lora_weights({str(folder / 'lora_ema')!r})  # or lora_trained, without averaging\n"
        f"{name}.from_pretrained({str(folder / _MERGED)!r}, dtype=torch.{dtype})  # merged"
    )
