"""task=evaluate: the base against a checkpoint, on held-out prompts.

Both make their images from the same noise, so what is compared is the same picture before and after training. Prompts
are the independent unit: images of one prompt are averaged first, and errors are over prompts.

Shapes: P prompts, n images per prompt.
"""

import io
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from solrl_lightning.build import build_module, device_of, load_adapters
from solrl_lightning.callbacks.sample_grid import Row, draw_grid
from solrl_lightning.callbacks.surface import write_atomically
from solrl_lightning.metrics.confidence import Mean, mean_of
from solrl_lightning.module import SolRLModule
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.rollout.seeds import evaluation_seeds
from solrl_lightning.tasks.report import format_table, write_json


def evaluate(cfg: DictConfig) -> dict[str, Any]:
    """Scores the base and, where ``cfg.ckpt`` names one, the checkpoint's average; writes evaluate.json and .png."""
    started = time.perf_counter()
    folder = Path(cfg.run_dir)
    module = build_module(cfg, device_of(cfg), [])
    seeds = evaluation_seeds(cfg.seed, module.eval_prompts, cfg.data.eval_images)
    models = {"base": _score(module, seeds, "base")}
    if cfg.ckpt is not None:
        load_adapters(module, cfg.ckpt)
        models["trained"] = _score(module, seeds, "ema")
    rewards = {name: scored.rewards.double().cpu() for name, scored in models.items()}

    result: dict[str, Any] = {
        "reward": module.reward.name,
        "checkpoint": cfg.ckpt,
        "prompts": seeds.shape[0],
        "images_per_prompt": seeds.shape[1],
        "steps": cfg.model.eval_steps,
        "seed": cfg.seed,
        **{name: over_prompts(values)._asdict() for name, values in rewards.items()},
    }
    if "trained" in rewards:
        result["difference"] = over_prompts(rewards["trained"] - rewards["base"])._asdict()
        result["win_rate"] = win_rate(rewards["trained"], rewards["base"])
    result["per_prompt"] = [
        {"prompt": prompt, **{name: values[row].mean().item() for name, values in rewards.items()}}
        for row, prompt in enumerate(module.eval_prompts)
    ]
    _draw(folder / "evaluate.png", module, models, cfg.task.grid_prompts, cfg.task.grid_images)
    result["seconds"] = time.perf_counter() - started
    write_json(folder / "evaluate.json", result)
    print(format_evaluation(result, folder))
    return result


def over_prompts(rewards: Tensor) -> Mean:
    """The mean of rewards [P, n], with its error over prompts."""
    return mean_of(rewards.mean(dim=1).tolist())


def win_rate(ours: Tensor, theirs: Tensor) -> float:
    """The share of images [P, n] with a higher reward than their counterparts; a tie is half a win."""
    return ((ours > theirs).double() + 0.5 * (ours == theirs).double()).mean().item()


def format_evaluation(result: dict[str, Any], folder: Path) -> str:
    names = [name for name in ("base", "trained", "difference") if name in result]
    rows = [[name, *(result[name][key] for key in ("mean", "standard_error", "low", "high"))] for name in names]
    lines = [
        f"{result['reward']} reward of {result['prompts']} prompts x {result['images_per_prompt']} images, "
        f"{result['steps']} steps, in {result['seconds']:.0f} s; errors are over prompts",
        format_table(["", "mean", "std error", "95 % from", "to"], rows),
    ]
    if "trained" in result:
        lines.append(f"  {100 * result['win_rate']:.0f} % of the images score higher than the base's of the same noise")
    return "\n".join([*lines, f"  {folder / 'evaluate.json'}, {folder / 'evaluate.png'}"])


def _score(module: SolRLModule, seeds: Tensor, weights: str) -> Candidates:
    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{weights}: {done} of {total} images", end=end, file=sys.stderr, flush=True)

    steps = module.sampling.eval_steps
    return module.score(module.eval_prompts, seeds, weights=weights, steps=steps, progress=progress)


def _draw(path: Path, module: SolRLModule, models: dict[str, Candidates], prompts: int, images: int) -> None:
    """The very images that were scored: the first prompts as rows, a block of columns per model."""
    rows = []
    for row, prompt in enumerate(module.eval_prompts[:prompts]):
        groups = [module.policy.decode(scored.latents[row, :images]).cpu() for scored in models.values()]
        rewards = [value for scored in models.values() for value in scored.rewards[row, :images].tolist()]
        rows.append(Row(prompt, groups, [f"{value:.2f}" for value in rewards]))
    buffer = io.BytesIO()
    draw_grid("Same held-out prompts, same noise", list(models), rows).save(buffer, format="PNG")
    write_atomically(path, buffer.getvalue())
