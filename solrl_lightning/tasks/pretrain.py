"""task=pretrain: rebuilds the embedded model."""

from pathlib import Path

from lightning.pytorch import seed_everything
from omegaconf import DictConfig

from solrl_lightning.build import device_of
from solrl_lightning.shapes.pretrain import Recipe, pretrain_pipeline


def pretrain(cfg: DictConfig) -> None:
    """Run the recipe of ``solrl_lightning.shapes.pretrain`` and write the pipeline into ``cfg.task.folder``."""
    seed_everything(cfg.seed, verbose=False)
    folder = Path(cfg.task.folder)
    pretrain_pipeline(folder, Recipe(seed=cfg.seed), device_of(cfg))
    print(f"The pipeline is in {folder}: train it with model.pretrained={folder}")
