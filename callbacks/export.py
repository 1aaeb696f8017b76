"""The trained LoRA in diffusers' format, at the end of a run and when it is interrupted."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.callbacks.common import module_of
from solrl_lightning.errors import WriteError


class ExportLoRA(Callback):
    """Writes the evaluation average to ``<run>/lora``; load it with ``pipe.load_lora_weights("<run>/lora")``."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._export(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Before the first step there is nothing to export, on a full disk no room, and a second error hides the first.
        if trainer.training and trainer.global_step > 0 and not isinstance(exception, WriteError):
            self._export(trainer, pl_module)

    def _export(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            module_of(pl_module).save_lora(Path(trainer.default_root_dir) / "lora", "ema")
