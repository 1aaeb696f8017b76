"""Re-quantises the old policy into the shadow before every exploration.

``on_train_epoch_start`` runs before the loop's roll-out, also in the first iteration after a resume. Checkpoints do not
hold the shadow.
"""

from lightning.pytorch import Callback, LightningModule, Trainer

from solrl_lightning.callbacks.common import loop_of, module_of


class Requantize(Callback):
    """Synchronises the replicas with the old policy at the start of every iteration (stage "requantize")."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with loop_of(trainer).stopwatch.stage("requantize"):
            module_of(pl_module).samplers.sync()
