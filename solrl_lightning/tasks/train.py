"""task=train: align the policy with the reward."""

from typing import Any

from lightning.pytorch import seed_everything
from omegaconf import DictConfig

from solrl_lightning.build import build_loop, build_module, build_trainer, stages_of
from solrl_lightning.data.loaders import RankShare


def train(cfg: DictConfig) -> dict[str, Any]:
    """Trains, resumes when ``cfg.ckpt`` names a checkpoint, and returns the logged metrics.

    Leaves the contents that the README lists in the run folder; an interrupted run leaves them too.
    """
    seed_everything(cfg.seed, verbose=False)
    trainer = build_trainer(cfg)
    module = build_module(cfg, trainer.strategy.root_device, stages_of(cfg))
    loop = build_loop(cfg, trainer)
    held_out = RankShare(module.eval_prompts, trainer.global_rank, trainer.world_size)
    if cfg.ckpt is None:
        trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, loop.loader, held_out, ckpt_path=cfg.ckpt, weights_only=True)
    return dict(trainer.logged_metrics)
