"""task=generate: samples images for given prompts, from the base model, and a checkpoint's average or a LoRA.

An image is a function of its prompt, its seed and the weights, so base and trained differ by the training only. The
task loads no reward and compiles nothing, because compilation takes longer than a few images.

Shapes: P prompts, n images per prompt.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solrl_lightning.artifacts.files import write_atomically
from solrl_lightning.artifacts.formatting import counted
from solrl_lightning.artifacts.pictures import Row, draw_grid, to_animation, to_image, to_png
from solrl_lightning.artifacts.tables import write_json
from solrl_lightning.build import build_model, device_of, load_weights, with_option
from solrl_lightning.data.prompt import Prompt, identities
from solrl_lightning.frames import filmstrip
from solrl_lightning.names import MERGED
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Generate
from solrl_lightning.run_prompts import requested_prompts
from solrl_lightning.seeds import evaluation_seeds
from solrl_lightning.training.module import SolRLModule


def generate(cfg: Run) -> dict[str, Any]:
    """Write images/*.png with their settings as text chunks, their list generate.json, and the grid generate.png.

    A video is a filmstrip, with a *.webp of all frames beside it.
    """
    task = cfg.task_as(Generate)
    started = time.perf_counter()
    prompts = requested_prompts(cfg)
    seeds, weights = evaluation_seeds(cfg.seed, identities(prompts), task.images), cfg.weights
    if task.seeds is not None:
        seeds = torch.tensor(task.seeds).expand(len(prompts), -1)
    folder = Path(cfg.run_dir)
    module = build_model(without_training(cfg), device_of(cfg.trainer))
    load_weights(module, cfg)

    images: list[dict[str, Any]] = []
    shown: dict[str, list[Tensor]] = {name: [] for name in weights}
    for name, state in weights.items():
        made_by = {"model": cfg.model.pretrained, "solver": cfg.model.solver, "steps": cfg.model.eval_steps}
        if name == "trained":
            made_by |= {"checkpoint": cfg.ckpt} if cfg.lora is None else {"lora": cfg.lora}
        for index, pictures in enumerate(sample_images(module, prompts, seeds, name, state)):
            if index < task.grid_prompts:
                shown[name].append(filmstrip(pictures[: task.grid_images]))
            for seed, picture, strip in zip(seeds[index].tolist(), pictures, filmstrip(pictures), strict=True):
                facts = {"prompt": prompts[index].identity, "seed": seed, "weights": name, **made_by}
                file = f"images/{index:04d}_{seed:010d}_{name}.png"
                write_atomically(folder / file, to_png(to_image(strip), facts))
                if picture.ndim == 4:
                    write_atomically((folder / file).with_suffix(".webp"), to_animation(picture))
                images.append({"file": file, **facts})

    groups = zip(prompts, *shown.values(), strict=False)  # of the first prompts
    rows = [Row(prompt.identity, images, input_image=prompt.input_image) for prompt, *images in groups]
    title = "Same prompts, same noise" if len(weights) > 1 else "Generated images"
    write_atomically(folder / "generate.png", to_png(draw_grid(title, list(weights), rows)))
    result = {"checkpoint": cfg.ckpt, "lora": cfg.lora, "images": images, "seconds": time.perf_counter() - started}
    write_json(folder / "generate.json", result)
    print(f"{counted(len(images), 'image')} in {result['seconds']:.0f} s")
    print(f"  {folder / 'images'}, {folder / 'generate.png'}")
    return result


def without_training(cfg: Run) -> Run:
    """Return a copy of the configuration without quantisation and compilation, which can be built on any device."""
    changed = with_option(cfg, "precision", "bf16")
    changed.family.compile = changed.compile_training = False
    changed.family.warning = None
    return changed


def sample_images(module: SolRLModule, prompts: list[Prompt], seeds: Tensor, name: str, state: str) -> Iterator[Tensor]:
    """Yield each prompt's images [n, 3, H, W] in [0, 1], or videos [n, F, 3, H, W].

    Samples as many prompts at once as fill a forward pass.
    """
    at_once = max(1, module.transformers.samplers[MERGED].batch_size.size // seeds.shape[1])
    for first in range(0, len(prompts), at_once):
        part = slice(first, first + at_once)
        steps = module.evaluation.steps
        yield from module.sample(prompts[part], seeds[part], weights=state, steps=steps, shown=lambda images: images)
        if sys.stderr.isatty():
            done = min(first + at_once, len(prompts))
            print(f"{name}: {done} of {len(prompts)} prompts", file=sys.stderr, flush=True)
