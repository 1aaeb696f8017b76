"""task=evaluate: compares the base with a checkpoint or a LoRA on held-out prompts, by any number of rewards.

Both models use the same noise, so images are compared in pairs. Prompts are the independent samples: images of one
prompt are averaged first, and errors are over prompts. The devices share the prompts.

Shapes: M models, P prompts, n images per prompt, R reported scores (every reward and, of several, their weighted sum).
"""

import csv
import io
import math
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from PIL import Image
from torch import Tensor, distributed

from solrl_lightning.artifacts.files import write_atomically
from solrl_lightning.artifacts.formatting import counted, numbers
from solrl_lightning.artifacts.pictures import Row, draw_grid, to_png
from solrl_lightning.artifacts.tables import format_table, write_json
from solrl_lightning.build import build_with_weights, instantiate_trainer
from solrl_lightning.data.loaders import RankPrompts
from solrl_lightning.data.prompt import Prompt, identities
from solrl_lightning.frames import filmstrip
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Evaluate
from solrl_lightning.seeds import evaluation_seeds
from solrl_lightning.study.confidence import Mean, mean_of
from solrl_lightning.training.evaluation import Evaluation, means_of
from solrl_lightning.training.module import SolRLModule

_COLUMNS = ("mean", "standard_error", "low", "high")


class Scored(NamedTuple):
    """Scores and pictures of one prompt."""

    scores: Tensor  # [M, n, R] float64 on the CPU
    pictures: Tensor | None  # [M, n', 3, H, W] uint8, of the first n' images; None for a prompt outside the grid


def evaluate(cfg: Run) -> dict[str, Any]:
    """Score the base and, if there is one, the checkpoint's average or the LoRA of model.init_lora.

    Writes evaluate.json (means, errors, differences), evaluate.csv (every image) and evaluate.png (side by side).
    """
    task = cfg.task_as(Evaluate)
    started = time.perf_counter()
    trainer = instantiate_trainer(cfg.trainer, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    module = build_with_weights(cfg, trainer.strategy.root_device, ())
    weights = {"base": "base"} | cfg.weights
    scorer = Scorer(module, weights, task.grid_prompts, task.grid_images)
    rank_prompts = RankPrompts(module.evaluation.prompts, trainer.global_rank, trainer.world_size)
    predictions: Any = trainer.predict(scorer, rank_prompts, return_predictions=True)
    ranks: list[Any] = [predictions[0]]
    if distributed.is_initialized():
        ranks *= trainer.world_size
        distributed.all_gather_object(ranks, predictions[0])
    scored = in_order(ranks)
    scores = torch.stack([row.scores for row in scored], dim=1)  # [M, P, n, R]

    names = module.evaluation.names
    for of_model in scores:
        means_of(names, of_model.nanmean(1))

    def by_reward(rows: Sequence[int]) -> dict[str, dict[str, Any]]:
        return {
            name: compare_models(list(weights), scores[:, rows, :, i], module.rewards.sign(name))
            for i, name in enumerate(names)
        }

    prompts = module.evaluation.prompts
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        if prompt.metadata.get("tag") is not None:
            kinds[prompt.metadata["tag"]].append(row)
    result: dict[str, Any] = {
        "checkpoint": cfg.ckpt,
        "lora": cfg.lora,
        "prompts": len(prompts),
        "images_per_prompt": cfg.data.eval_images,
        "steps": cfg.model.eval_steps,
        "seed": cfg.seed,
        "rewards": by_reward(range(len(prompts))),
        "tags": {tag: by_reward(rows) for tag, rows in kinds.items()},
        "seconds": time.perf_counter() - started,
    }
    means = scores.nanmean(dim=2).permute(1, 2, 0).tolist()  # [P, R, M]
    result["per_prompt"] = [
        {"prompt": prompt.identity}
        | {name: dict(zip(weights, values, strict=True)) for name, values in zip(names, row, strict=True)}
        for prompt, row in zip(prompts, means, strict=True)
    ]
    if trainer.is_global_zero:
        folder = Path(cfg.run_dir)
        write_json(folder / "evaluate.json", result)
        write_atomically(folder / "evaluate.csv", to_csv(module.evaluation, list(weights), scores).encode())
        write_atomically(folder / "evaluate.png", to_png(draw(module.evaluation, list(weights), scored)))
        print(format_evaluation(result, folder))
    return result


class Scorer(LightningModule):
    """Scores this rank's prompts with each of the weights. ``Trainer.predict`` places it on devices."""

    def __init__(self, module: SolRLModule, weights: Mapping[str, str], grid_prompts: int, grid_images: int) -> None:
        super().__init__()
        self.module, self.weights = module, dict(weights)
        self.grid_prompts, self.grid_images = grid_prompts, grid_images

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch: prompts have no tensors."""
        return batch

    def predict_step(self, prompts: list[Prompt], batch_idx: int) -> list[Scored]:
        if not prompts:
            return []
        module = self.module
        evaluation = module.evaluation
        seeds = evaluation_seeds(evaluation.seed, identities(prompts), evaluation.images)
        scores, latents = [], []
        for name, weights in self.weights.items():
            progress = partial(self.progress, name)
            candidates = module.score(prompts, seeds, weights=weights, steps=evaluation.steps, progress=progress)
            scores.append(evaluation.scores(candidates).double().cpu())
            latents.append(candidates.x0[:, : self.grid_images])
        shown = set(evaluation.prompts[: self.grid_prompts])
        rows = zip(prompts, torch.stack(scores, dim=1), torch.stack(latents, dim=1), strict=True)
        return [Scored(score, self.pictures(x) if prompt in shown else None) for prompt, score, x in rows]

    def pictures(self, x0: Tensor) -> Tensor:
        """Return uint8 [M, n', 3, H, W] of latents [M, n', ...]."""
        images = (filmstrip(self.module.model.decode(latents)) for latents in x0)
        return torch.stack([(each * 255).round().byte().cpu() for each in images])

    def progress(self, name: str, done: int, total: int) -> None:
        if sys.stderr.isatty() and self.trainer.is_global_zero:
            end = "\n" if done == total else ""
            print(f"\r{name}: {done} of {total} images", end=end, file=sys.stderr, flush=True)


def in_order(ranks: Sequence[Sequence[Scored]]) -> list[Scored]:
    """Gather the results of all ranks in the order of the prompts; rank r of w has prompts [r::w]."""
    return [row for rows in zip_longest(*ranks) for row in rows if row is not None]


def compare_models(models: Sequence[str], scores: Tensor, sign: int = 1) -> dict[str, Any]:
    """Return means of scores [M, P, n] by model and, of two models, difference and win rate of the trained one.

    With ``sign`` -1 the lower score wins.
    All are over the images that every model has a score of, and the prompts with such images.
    """
    paired = scores.isfinite().all(dim=0)  # [P, n]
    scores = torch.where(paired, scores, torch.nan)[:, paired.any(dim=1)]
    result: dict[str, Any] = {name: over_prompts(score)._asdict() for name, score in zip(models, scores, strict=True)}
    if len(scores) > 1:
        base, trained = scores
        wins = win_rate(sign * trained, sign * base)
        result |= {"difference": over_prompts(trained - base)._asdict(), "win_rate": wins}
    return result


def over_prompts(scores: Tensor) -> Mean:
    """Return the mean of scores [P, n] with its error over prompts; of no prompts, NaN."""
    return mean_of(scores.nanmean(dim=1).tolist() or [math.nan])


def win_rate(ours: Tensor, theirs: Tensor) -> float:
    """Return the share of images [P, n] with a higher score than their counterparts; a tie counts as half a win.

    Pairs without both scores are left out.
    """
    difference = (ours - theirs)[(ours - theirs).isfinite()]
    return ((difference > 0).double() + 0.5 * (difference == 0).double()).mean().item()


def to_csv(evaluation: Evaluation, models: Sequence[str], scores: Tensor) -> str:
    """Return CSV of scores [M, P, n, R] with one line per image: prompt, seed, and every score of every model."""
    prompts = identities(evaluation.prompts)
    seeds = evaluation_seeds(evaluation.seed, prompts, evaluation.images)
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["prompt", "seed", *(f"{name} {model}" for name in evaluation.names for model in models)])
    for prompt, prompt_seeds, rows in zip(prompts, seeds.tolist(), scores.permute(1, 2, 3, 0), strict=True):
        table.writerows([prompt, seed, *row.flatten().tolist()] for seed, row in zip(prompt_seeds, rows, strict=True))
    return text.getvalue()


def draw(evaluation: Evaluation, models: Sequence[str], scored: Sequence[Scored]) -> Image.Image:
    """Draw a grid of scored images: a row per prompt, a block of columns per model, the total score below each."""
    rows = []
    for prompt, (scores, pictures) in zip(evaluation.prompts, scored, strict=True):
        if pictures is not None:
            totals = scores[:, : pictures.shape[1], -1].flatten().tolist()
            groups = list(pictures.float() / 255)
            rows.append(Row(prompt.identity, groups, numbers(totals, 3), prompt.input_image))
    title = f"Same held-out prompts, same noise; {evaluation.names[-1]} below"
    return draw_grid(title, models, rows)


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
        f"{counted(result['prompts'], 'prompt')} x {counted(result['images_per_prompt'], 'image')}, "
        f"{counted(result['steps'], 'step')}, in {result['seconds']:.0f} s; errors are over prompts; "
        "wins are of images over the base's of the same noise, ties half",
        format_table(["", "mean", "std error", "95 % from", "to", "wins"], rows),
    ]
    if result["tags"]:
        lines.append(format_tags(result["tags"]))
    if result["checkpoint"] is None and result["lora"] is None:
        lines.append("  the base alone; ckpt=last or model.init_lora=<LoRA> compares it with trained weights")
    files = ", ".join(str(folder / f"evaluate.{suffix}") for suffix in ("json", "csv", "png"))
    return "\n".join([*lines, f"  {files}"])


def format_tags(tags: Mapping[str, dict[str, dict[str, Any]]]) -> str:
    """Return the table of mean scores with a line per kind of prompt and a column per reward and model."""
    first = next(iter(tags.values()))
    columns = [(reward, model) for reward, means in first.items() for model in ("base", "trained") if model in means]
    rows = [[tag, *(means[reward][model]["mean"] for reward, model in columns)] for tag, means in tags.items()]
    return format_table(["kind of prompt", *(f"{reward} {model}" for reward, model in columns)], rows)
