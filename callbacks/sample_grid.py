"""Draws sample grids: base and current model side by side, and the best and worst samples of a prompt.

Only rank 0 samples and draws, so no call may be collective.
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image

from solrl_lightning.artifacts.files import write_atomically
from solrl_lightning.artifacts.formatting import counted, numbers
from solrl_lightning.artifacts.loggers import trackers_of
from solrl_lightning.artifacts.pictures import Row, draw_grid, to_png
from solrl_lightning.callbacks.common import loop_of, module_of
from solrl_lightning.data.prompt import identities
from solrl_lightning.frames import filmstrip
from solrl_lightning.options.rules import Count, CountOrZero, Images, Seed, Steps
from solrl_lightning.seeds import evaluation_seeds


class SampleGrid(Callback):
    """Writes ``samples/grid_<iterations>.png`` and ``pool_<iterations>.png``, and gives them to the loggers.

    Args:
        every: iterations from one picture to the next; 0 writes none. The last iteration has one, too.
        prompts: number of held-out prompts in the first grid, one row each.
        steps: solver steps of their images.
        seeds_per_prompt: images per prompt and model in the first grid; best and worst samples in the second.
        seed: of the noise, which is the same in every picture of a run.
    """

    def __init__(self, every: CountOrZero, prompts: Count, seeds_per_prompt: Images, steps: Steps, seed: Seed) -> None:
        self.every, self.prompts, self.seeds_per_prompt = every, prompts, seeds_per_prompt
        self.steps, self.seed = steps, seed
        self._base = torch.empty(0)  # [P, n, 3, H, W]
        self._pool: Image.Image | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Draw the best and worst samples of this rank's first prompt."""
        rollouts = loop_of(trainer).rollouts
        if batch_idx != 0 or not self._due(trainer) or not rollouts.prompts:
            return
        with loop_of(trainer).stopwatch.stage("grid"), torch.no_grad():
            rewards = rollouts.rewards[0]
            shown = min(self.seeds_per_prompt, len(rewards) // 2)  # no sample is in both rows
            order = rewards.argsort(descending=True, stable=True)
            labels = numbers(rewards.tolist(), 3)
            rows = []
            for name, chosen in (("best", order[:shown]), ("worst", order[-shown:])):
                latents = rollouts.x0[0][chosen.to(rollouts.x0.device)].to(pl_module.device)
                images = torch.cat([filmstrip(module_of(pl_module).model.decode(x[None])) for x in latents])
                rows.append(Row(name, [images], [labels[place] for place in chosen.tolist()]))
            title = f"{shown} best and {shown} worst of {len(rewards)}, iteration {trainer.current_epoch + 1}"
            self._pool = draw_grid(title, [rollouts.prompts[0].identity], rows)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._due(trainer):
            return
        done, prompts = trainer.current_epoch + 1, module_of(pl_module).evaluation.prompts[: self.prompts]
        seeds = evaluation_seeds(self.seed, identities(prompts), self.seeds_per_prompt)
        with loop_of(trainer).stopwatch.stage("grid"):
            if not len(self._base):
                self._base = module_of(pl_module).sample(prompts, seeds, weights="base", steps=self.steps)
            current = module_of(pl_module).sample(prompts, seeds, weights="ema", steps=self.steps)
            groups = zip(prompts, self._base, current, strict=True)
            rows = [Row(prompt.identity, images, input_image=prompt.input_image) for prompt, *images in groups]
            headings = ["base", f"after {counted(done, 'iteration')}"]
            self._publish(trainer, "grid", draw_grid("Same held-out prompts, same noise", headings, rows))
            if self._pool is not None:
                self._publish(trainer, "pool", self._pool)
                self._pool = None

    def _due(self, trainer: Trainer) -> bool:
        done = trainer.current_epoch + 1
        return self.every > 0 and trainer.is_global_zero and (done % self.every == 0 or done == trainer.max_epochs)

    def _publish(self, trainer: Trainer, name: str, picture: Image.Image) -> None:
        done = trainer.current_epoch + 1
        write_atomically(Path(trainer.default_root_dir) / "samples" / f"{name}_{done:06d}.png", to_png(picture))
        for tracker in trackers_of(trainer):
            tracker.log_picture(f"samples/{name}", picture, done)
