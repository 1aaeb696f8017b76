"""Exports what a run has trained in diffusers' format when it ends or is interrupted."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from solrl_lightning.artifacts.files import read_checkpoint
from solrl_lightning.callbacks.checkpoints import BestCheckpoint
from solrl_lightning.callbacks.common import find_callback, module_of, stop_reason
from solrl_lightning.callbacks.ema import average_in
from solrl_lightning.errors import NonFiniteError, WriteError
from solrl_lightning.training.shards import is_sharded


class ExportLoRA(Callback):
    """Writes the average of the trained weights, or these without ``callbacks.ema``: of the last iteration or, if the
    guard or EarlyStopping has ended the run, of ``checkpoints/best.ckpt``. Load ``<run>/lora`` with
    ``pipe.load_lora_weights("<run>/lora")``. With model.train=full it is ``<run>/transformer``, for the transformer's
    ``from_pretrained``.
    """

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._export(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # A WriteError means that the disk is full, and a second error here would hide the first; after a NonFiniteError
        # the weights may have diverged.
        fits = trainer.state.fn == TrainerFn.FITTING  # or evaluates between iterations
        if fits and trainer.global_step > 0 and not isinstance(exception, WriteError | NonFiniteError):
            # Sharded weights are gathered by all ranks, which only this exception reaches together.
            sharded = is_sharded(module_of(pl_module).policy_state("default"))
            if not sharded or isinstance(exception, SIGTERMException):
                self._export(trainer, pl_module)

    def _export(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module, best = module_of(pl_module), find_callback(trainer, BestCheckpoint)
        if best is not None and best.reward is not None and stop_reason(trainer) is not None:
            checkpoint = read_checkpoint(best.path)
            module.ema_state = average_in(checkpoint, module.policy_state("default"))
            if module.ema_state is None:  # of a run without callbacks.ema, whose trained weights are exported
                trainer.strategy.load_model_state_dict(checkpoint, strict=False)
        module.save_policy(Path(trainer.default_root_dir) / module.transformers.trained.folder, "ema")
