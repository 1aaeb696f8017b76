"""Bring the shadow up to date with the old policy before every exploration.

``on_train_epoch_start`` runs ahead of the loop's roll-out, also in the first iteration after a resume: the shadow is in
no checkpoint and has to be made again.
"""

from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.callbacks.common import loop_of, module_of


class Requantize(Callback):
    """Re-quantise the old policy into the shadow at the start of every iteration (stage "requantize")."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with loop_of(trainer).stopwatch.stage("requantize"):
            module_of(pl_module).samplers.sync()
