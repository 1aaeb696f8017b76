"""Write checkpoints: after the last iteration, after the best evaluation, and after every few iterations.

Lightning's ModelCheckpoint does not write the last iteration of a run unless it is one of every few. It warns until the
first evaluation, compares stale scores in the iterations between evaluations, forgets its best score when the folder is
moved, and counts from 0 in file names.
"""

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from solrl_lightning.artifacts.files import CHECKPOINT_BYTES, read_checkpoint
from solrl_lightning.artifacts.run_folder import BEST, LAST
from solrl_lightning.callbacks.common import loop_of, module_of
from solrl_lightning.errors import UserError
from solrl_lightning.names import TRAINED
from solrl_lightning.options.rules import Count, CountOrZero

log = logging.getLogger(__name__)

_LARGE = 4 * 10**9  # bytes that take seconds to write


class LastCheckpoint(Checkpoint):
    """Writes ``last.ckpt`` after every few iterations, and after the last one of the run.

    Args:
        dirpath: folder of the checkpoints.
        every: iterations from one to the next; None: 1, or 10 if the file has more than 4 GB.
    """

    def __init__(self, dirpath: str, every: Count | None = None) -> None:
        self.path, self.every = Path(dirpath) / LAST.name, every

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop, every = loop_of(trainer), self.every
        if every is None:
            state = module_of(pl_module).policy_state(TRAINED)
            size = CHECKPOINT_BYTES * sum(weight.numel() for weight in state.values())
            every = 1 if size <= _LARGE else 10
        ends = trainer.should_stop or loop.iterations_done == trainer.max_epochs
        if ends or loop.iterations_done % every == 0:
            with loop.stopwatch.stage("checkpoint"):
                trainer.save_checkpoint(self.path, weights_only=False)


class BestCheckpoint(Checkpoint):
    """Writes ``best.ckpt`` after every iteration whose evaluation is the best since training began.

    A resume with other evaluations begins anew, and keeps the earlier file as ``best_<iteration>.ckpt``. The file may
    be of a later iteration than ``last.ckpt``, if the run was killed between the two.

    Must precede the callback that writes ``last.ckpt``, whose state then includes this one.

    Args:
        dirpath: folder of the checkpoints.
        monitor: name of a held-out reward, the least of which is the best if its weight is negative; None: the one that
            is trained on.
    """

    def __init__(self, dirpath: str, monitor: str | None = None) -> None:
        self.path, self.monitor = Path(dirpath) / BEST.name, monitor
        self.reward: float | None = None
        self.iteration: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = self._state_in_file() if trainer.is_global_zero else {}
        self.load_state_dict(trainer.strategy.broadcast(state))
        if self.iteration is not None and not module_of(pl_module).evaluation.comparable:
            if trainer.is_global_zero:
                earlier = self.path.replace(self.path.with_stem(f"{self.path.stem}_{self.iteration:06d}"))
                log.info("the best checkpoint by the earlier evaluations is kept as %s", earlier)
            self.reward = self.iteration = None

    def _state_in_file(self) -> dict[str, Any]:
        """Return the state with which ``best.ckpt`` was written; an empty one of a branch, which has no file yet."""
        empty = {"reward": None, "iteration": None}
        if not self.path.is_file():
            if self.iteration is not None and self.path.with_name(LAST.name).is_file():
                log.warning(
                    "%s of iteration %d is missing. The next evaluation writes it anew.", self.path, self.iteration
                )
            return empty
        try:
            state: dict[str, Any] = read_checkpoint(self.path)["callbacks"].get(self.state_key, empty)
        except UserError as error:
            log.warning("%s The next evaluation writes it anew.", error)
            return empty
        return state

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module, iteration = module_of(pl_module), loop_of(trainer).iterations_done
        row = module.evaluation.history[-1] if module.evaluation.history else {}
        if row.get("iteration") != iteration:
            return
        name = self.monitor or module.rewards.name
        reward, sign = row[name], module.rewards.sign(name)
        if self.reward is None or sign * reward > sign * self.reward:
            self.reward, self.iteration = reward, iteration
            trainer.save_checkpoint(self.path, weights_only=False)

    def state_dict(self) -> dict[str, Any]:
        return {"reward": self.reward, "iteration": self.iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reward, self.iteration = state_dict["reward"], state_dict["iteration"]


class PeriodicCheckpoints(Checkpoint):
    """Writes ``iteration_<iterations>.ckpt``.

    Args:
        dirpath: folder of the checkpoints.
        every: iterations from one checkpoint to the next; 0 writes none.
        keep: number of files to keep, the newest; None keeps all.
    """

    def __init__(self, dirpath: str, every: CountOrZero, keep: Count | None = None) -> None:
        self.folder, self.every, self.keep = Path(dirpath), every, keep

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        done = loop_of(trainer).iterations_done
        if self.every == 0 or done % self.every != 0:
            return
        newest = self.folder / f"iteration_{done:06d}.ckpt"
        trainer.save_checkpoint(newest, weights_only=False)
        if self.keep is not None and trainer.is_global_zero:
            # Without the later files of a run that resumed from an earlier one: they are not of this training.
            files = sorted(file for file in self.folder.glob("iteration_*.ckpt") if file <= newest)
            for file in files[: -self.keep]:
                file.unlink()
