"""Give the old policy's weights to everything that samples before every rollout, also after a resume."""

from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.callbacks.common import loop_of, module_of


class Requantize(Callback):
    """Stage "requantize": the hook runs before the loop's roll-out."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with loop_of(trainer).stopwatch.stage("requantize"):
            module_of(pl_module).requantize(loop_of(trainer).iterations_done)
