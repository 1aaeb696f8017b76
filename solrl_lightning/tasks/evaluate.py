"""task=evaluate: compares the base with a checkpoint on held-out prompts, by any number of rewards.

Both models use the same noise, so images are compared in pairs. Prompts are the independent samples: images of one
prompt are averaged first, and errors are over prompts. The devices share the prompts.

Shapes: P prompts, n images per prompt, R reported scores (every reward and, of several, their weighted sum).
"""

import csv
import io
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor, distributed

from solrl_lightning.build import build_module, instantiate_trainer, load_adapters
from solrl_lightning.data.loaders import RankPrompts
from solrl_lightning.data.prompts import read_tags
from solrl_lightning.files import write_atomically
from solrl_lightning.metrics.confidence import Mean, mean_of
from solrl_lightning.module import SolRLModule
from solrl_lightning.pictures import Row, draw_grid, to_png
from solrl_lightning.seeds import evaluation_seeds
from solrl_lightning.tasks.tables import format_table, write_json

_COLUMNS = ("mean", "standard_error", "low", "high")


class Scored(NamedTuple):
    """Scores and pictures of one model."""

    scores: Tensor  # [P, n, R] float64 on the CPU
    pictures: Tensor  # [p, n', 3, H, W] uint8, of the first of these prompts and images


def evaluate(cfg: DictConfig) -> dict[str, Any]:
    """Score the base and, if ``cfg.ckpt`` is given, the checkpoint's average.

    Writes evaluate.json (means, errors, differences), evaluate.csv (every image) and evaluate.png (side by side).
    """
    started = time.perf_counter()
    trainer = instantiate_trainer(cfg, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    module = build_module(cfg, trainer.strategy.root_device, [])
    weights = {"base": "base"}
    if cfg.ckpt is not None:
        load_adapters(module, cfg.ckpt)
        weights["trained"] = "ema"
    scorer = Scorer(module, weights, cfg.task.grid_prompts, cfg.task.grid_images)
    share = RankPrompts(module.eval_prompts, trainer.global_rank, trainer.world_size)
    found: Any = trainer.predict(scorer, share, return_predictions=True)
    models = in_order(gathered(found[0]))
    tags, prompts = read_tags(cfg.data.eval, cfg.data.column), module.eval_prompts
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        if prompt in tags:
            kinds[tags[prompt]].append(row)
    result: dict[str, Any] = {
        "checkpoint": cfg.ckpt,
        "prompts": len(prompts),
        "images_per_prompt": cfg.data.eval_images,
        "steps": cfg.model.eval_steps,
        "seed": cfg.seed,
        "rewards": by_reward(module, models, list(range(len(prompts)))),
        "tags": {tag: by_reward(module, models, rows) for tag, rows in kinds.items()},
        "seconds": time.perf_counter() - started,
    }
    means = {model: scored.scores.mean(dim=1).tolist() for model, scored in models.items()}
    result["per_prompt"] = [
        {"prompt": prompt}
        | {name: {model: rows[row][i] for model, rows in means.items()} for i, name in enumerate(module.evaluated)}
        for row, prompt in enumerate(prompts)
    ]
    if trainer.is_global_zero:
        folder = Path(cfg.run_dir)
        write_json(folder / "evaluate.json", result)
        write_atomically(folder / "evaluate.csv", to_csv(module, models).encode())
        write_atomically(folder / "evaluate.png", to_png(draw(module, models)))
        print(format_evaluation(result, folder))
    return result


class Scorer(LightningModule):
    """Scores this rank's prompts with each of the weights. ``Trainer.predict`` places it on devices."""

    def __init__(self, module: SolRLModule, weights: Mapping[str, str], grid_prompts: int, grid_images: int) -> None:
        super().__init__()
        self.module, self.weights = module, dict(weights)
        self.grid_prompts, self.grid_images = grid_prompts, grid_images

    def predict_step(self, prompts: list[str], batch_idx: int) -> dict[str, Scored]:
        return {name: self.score(prompts, name, weights) for name, weights in self.weights.items()}

    def score(self, prompts: list[str], name: str, weights: str) -> Scored:
        module = self.module
        if not prompts:
            return Scored(torch.empty(0, module.evaluation.images, len(module.evaluated)), torch.empty(0))
        seeds = evaluation_seeds(module.seed, prompts, module.evaluation.images)

        def progress(done: int, total: int) -> None:
            if sys.stderr.isatty() and self.trainer.is_global_zero:
                end = "\n" if done == total else ""
                print(f"\r{name}: {done} of {total} images", end=end, file=sys.stderr, flush=True)

        scored = module.score(prompts, seeds, weights=weights, steps=module.evaluation.steps, progress=progress)
        shown = set(module.eval_prompts[: self.grid_prompts])
        pictures = [
            (module.policy.decode(latents[: self.grid_images]) * 255).round().byte().cpu()
            for prompt, latents in zip(prompts, scored.x0, strict=True)
            if prompt in shown
        ]
        scores = module.evaluated_scores(scored).double().cpu()
        return Scored(scores, torch.stack(pictures) if pictures else torch.empty(0))


def gathered(own: dict[str, Scored]) -> list[dict[str, Scored]]:
    """The results of all ranks, in the order of ranks. Collective."""
    found: list[Any] = [own]
    if distributed.is_initialized():
        found *= distributed.get_world_size()
        distributed.all_gather_object(found, own)
    return found


def in_order(ranks: Sequence[Mapping[str, Scored]]) -> dict[str, Scored]:
    """Merge the results of all ranks in the order of the prompts; rank r of w has prompts [r::w]."""

    def interleaved(parts: Sequence[Tensor]) -> Tensor:
        rows = [part[i] for i in range(len(parts[0])) for part in parts if i < len(part)]
        return torch.stack(rows)

    return {
        name: Scored(*(interleaved([rank[name][field] for rank in ranks]) for field in range(2))) for name in ranks[0]
    }


def by_reward(module: SolRLModule, models: Mapping[str, Scored], rows: Sequence[int]) -> dict[str, dict[str, Any]]:
    """reward -> ``compared`` of its scores, for the prompts ``rows``."""
    return {
        name: compared({model: scored.scores[rows, :, i] for model, scored in models.items()})
        for i, name in enumerate(module.evaluated)
    }


def compared(scores: Mapping[str, Tensor]) -> dict[str, Any]:
    """Means of scores [P, n] by model and, with two models, the difference and the win rate of the trained one."""
    result: dict[str, Any] = {name: over_prompts(values)._asdict() for name, values in scores.items()}
    if "trained" in scores:
        result["difference"] = over_prompts(scores["trained"] - scores["base"])._asdict()
        result["win_rate"] = win_rate(scores["trained"], scores["base"])
    return result


def over_prompts(scores: Tensor) -> Mean:
    """Mean of scores [P, n] with its error over prompts."""
    return mean_of(scores.mean(dim=1).tolist())


def win_rate(ours: Tensor, theirs: Tensor) -> float:
    """Share of images [P, n] with a higher score than their counterparts; a tie counts as half a win."""
    return ((ours > theirs).double() + 0.5 * (ours == theirs).double()).mean().item()


def to_csv(module: SolRLModule, models: Mapping[str, Scored]) -> str:
    """CSV with one line per image: prompt, seed, and every score of every model."""
    seeds = evaluation_seeds(module.seed, module.eval_prompts, module.evaluation.images)
    columns = [f"{name} {model}" for name in module.evaluated for model in models]
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["prompt", "seed", *columns])
    for row, prompt in enumerate(module.eval_prompts):
        for image, seed in enumerate(seeds[row].tolist()):
            scores = torch.stack([scored.scores[row, image] for scored in models.values()], dim=1)  # [R, models]
            table.writerow([prompt, seed, *scores.flatten().tolist()])
    return text.getvalue()


def draw(module: SolRLModule, models: Mapping[str, Scored]) -> Image.Image:
    """Grid of scored images: a row per prompt, a block of columns per model, the total score below each image."""
    rows = []
    shown = len(next(iter(models.values())).pictures)
    for row, prompt in enumerate(module.eval_prompts[:shown]):
        groups = [scored.pictures[row].float() / 255 for scored in models.values()]
        totals = [value for scored in models.values() for value in scored.scores[row, :, -1].tolist()[: len(groups[0])]]
        rows.append(Row(prompt, groups, [f"{value:.3g}" for value in totals]))
    return draw_grid(f"Same held-out prompts, same noise; {module.evaluated[-1]} below", list(models), rows)


def format_evaluation(result: dict[str, Any], folder: Path) -> str:
    rows = [
        [
            f"{reward} {name}",
            *(means[name][key] for key in _COLUMNS),
            f"{100 * means['win_rate']:.0f} %" if name == "difference" else "",
        ]
        for reward, means in result["rewards"].items()
        for name in ("base", "trained", "difference")
        if name in means
    ]
    lines = [
        f"{result['prompts']} prompts x {result['images_per_prompt']} images, {result['steps']} steps, in "
        f"{result['seconds']:.0f} s; errors are over prompts; wins are of images over the base's of the same noise",
        format_table(["", "mean", "std error", "95 % from", "to", "wins"], rows),
    ]
    if result["tags"]:
        lines.append(format_tags(result["tags"]))
    if result["checkpoint"] is None:
        lines.append("  the base alone; ckpt=last or ckpt=<file> compares it with a trained model")
    files = ", ".join(str(folder / f"evaluate.{suffix}") for suffix in ("json", "csv", "png"))
    return "\n".join([*lines, f"  {files}"])


def format_tags(tags: Mapping[str, dict[str, dict[str, Any]]]) -> str:
    """Table of mean scores with a line per kind of prompt and a column per reward and model."""
    first = next(iter(tags.values()))
    columns = [(reward, model) for reward, means in first.items() for model in ("base", "trained") if model in means]
    rows = [[tag, *(means[reward][model]["mean"] for reward, model in columns)] for tag, means in tags.items()]
    return format_table(["kind of prompt", *(f"{reward} {model}" for reward, model in columns)], rows)
