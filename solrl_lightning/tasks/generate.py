"""task=generate: pictures for prompts of the user's own, by the base model and a checkpoint's evaluation average.

A picture is a function of its prompt, its seed and the weights, so base beside trained shows what training changed. No
reward is loaded, and nothing is compiled: for a few pictures the compiler takes longer than it saves.

Shapes: P prompts, n images per prompt.
"""

import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from solrl_lightning.build import build_model, device_of, load_adapters, with_option
from solrl_lightning.callbacks.sample_grid import Row, draw_grid
from solrl_lightning.callbacks.surface import write_atomically
from solrl_lightning.data.prompts import read_prompts
from solrl_lightning.errors import UserError
from solrl_lightning.module import SolRLModule
from solrl_lightning.rollout.seeds import evaluation_seeds
from solrl_lightning.tasks.report import write_json

_SEEDS = 2**32  # noise has so many seeds


def generate(cfg: DictConfig) -> dict[str, Any]:
    """Writes images/*.png, whose text chunks say how each was made, their list generate.json, and generate.png."""
    started = time.perf_counter()
    prompts = asked_prompts(cfg)
    seeds = asked_seeds(cfg, prompts)
    weights = asked_weights(cfg)
    folder = Path(cfg.run_dir)
    module = build_model(without_training(cfg), device_of(cfg))
    if cfg.ckpt is not None:
        load_adapters(module, cfg.ckpt)

    images: list[dict[str, Any]] = []
    shown: dict[str, list[Tensor]] = {name: [] for name in weights}
    for name, state in weights.items():
        for index, pictures in enumerate(sampled(module, prompts, seeds, name, state)):
            if index < cfg.task.grid_prompts:
                shown[name].append(pictures[: cfg.task.grid_images])
            for seed, picture in zip(seeds[index].tolist(), pictures, strict=True):
                facts = {"prompt": prompts[index], "seed": seed, "weights": name, **how_made(cfg, name)}
                file = f"images/{index:04d}_{seed:010d}_{name}.png"
                write_atomically(folder / file, to_png(as_image(picture), facts))
                images.append({"file": file, **facts})

    rows = [Row(prompt, group) for prompt, *group in zip(prompts, *shown.values(), strict=False)]  # the first ones
    title = "Same prompts, same noise" if len(weights) > 1 else "Generated images"
    write_atomically(folder / "generate.png", to_png(draw_grid(title, list(weights), rows), {}))
    result = {"checkpoint": cfg.ckpt, "images": images, "seconds": time.perf_counter() - started}
    write_json(folder / "generate.json", result)
    print(f"{len(images)} images in {result['seconds']:.0f} s\n  {folder / 'images'}, {folder / 'generate.png'}")
    return result


# What is asked for


def asked_prompts(cfg: DictConfig) -> list[str]:
    """P texts, from the command line or a file."""
    given, file = OmegaConf.to_container(cfg.task)["prompts"], cfg.task.prompt_file  # type: ignore[call-overload, index]
    example = """for example 'task.prompts=["a red apple", "two dogs"]'"""
    if not isinstance(given, list):
        raise UserError(f"task.prompts must be a list of texts, {example}; got {given!r}")
    if bool(given) == (file is not None):
        found = "both" if given else "neither"
        raise UserError(f"task=generate takes task.prompts, {example}, or task.prompt_file=<file>; got {found}")
    for prompt in given:
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f"every one of task.prompts must be a text, {example}; got {prompt!r} among them")
    return given or read_prompts(file, cfg.data.column)


def asked_seeds(cfg: DictConfig, prompts: list[str]) -> Tensor:
    """int64 [P, n]: those of evaluations, each prompt its own, or the given ones for every prompt."""
    if cfg.task.seeds is None:
        if not _is_whole(cfg.task.images) or cfg.task.images < 1:
            raise UserError(f"task.images must be a whole number of at least 1; got {cfg.task.images!r}")
        return evaluation_seeds(cfg.seed, prompts, cfg.task.images)
    given = OmegaConf.to_container(cfg.task)["seeds"]  # type: ignore[call-overload, index]
    whole = isinstance(given, list) and all(_is_whole(seed) and 0 <= seed < _SEEDS for seed in given)
    if not whole or not given or len(set(given)) < len(given):
        raise UserError(
            "task.seeds must be a list of different whole numbers from 0 to 4294967295, for example "
            f"'task.seeds=[1,2,3]'; got {given!r}. Leave it out for the seeds of evaluations."
        )
    return torch.tensor(given).expand(len(prompts), -1)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def asked_weights(cfg: DictConfig) -> dict[str, str]:
    """The name of each model here, and its name in ``SolRLModule.sample``."""
    if not cfg.task.base and cfg.ckpt is None:
        raise UserError("task.base=false leaves the trained weights only; name them with ckpt=<file> or ckpt=last")
    return ({"base": "base"} if cfg.task.base else {}) | ({"trained": "ema"} if cfg.ckpt is not None else {})


def without_training(cfg: DictConfig) -> DictConfig:
    """A copy whose module neither quantises nor compiles, so that it can be built on any device."""
    changed = with_option(cfg, "precision", "bf16")
    changed.family.compile = False
    changed.family.warning = None
    return changed


# Making it


def sampled(module: SolRLModule, prompts: list[str], seeds: Tensor, name: str, state: str) -> Iterator[Tensor]:
    """Yields each prompt's images [n, 3, H, W] in [0, 1]; as many prompts at once as fill a forward pass."""
    at_once = max(1, module.sampling.batch // seeds.shape[1])
    for first in range(0, len(prompts), at_once):
        part = slice(first, first + at_once)
        yield from module.sample(prompts[part], seeds[part], weights=state, steps=module.sampling.eval_steps)
        if sys.stderr.isatty():
            done = min(first + at_once, len(prompts))
            print(f"{name}: {done} of {len(prompts)} prompts", file=sys.stderr, flush=True)


def how_made(cfg: DictConfig, name: str) -> dict[str, Any]:
    facts = {"model": cfg.model.pretrained, "solver": cfg.model.solver, "steps": cfg.model.eval_steps}
    return facts | ({"checkpoint": cfg.ckpt} if name == "trained" else {})


def as_image(pixels: Tensor) -> Image.Image:
    """[3, H, W] in [0, 1] -> a picture of that size."""
    return Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).contiguous().numpy())


def to_png(image: Image.Image, facts: dict[str, Any]) -> bytes:
    """A PNG file with the facts as text chunks, in UTF-8 because prompts are any text."""
    text = PngInfo()
    for key, value in facts.items():
        text.add_itxt(key, str(value))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=text)
    return buffer.getvalue()
