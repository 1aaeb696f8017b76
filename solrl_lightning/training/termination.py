"""SIGTERM: a run ends at the next micro-batch or after the evaluation under way, on all ranks at once.

Lightning 2.6 broadcasts the signal in its handler, which waits for ever if another collective is under way there.
"""

from types import FrameType

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from solrl_lightning.machine import interrupts


class Termination:
    """Replaces Lightning's handler of SIGTERM, and what it calls on every rank before a micro-batch."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        interrupts.ENDING.clear()
        trainer._signal_connector._sigterm_notifier_fn = self._request  # type: ignore[assignment,method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self.raise_on_all  # type: ignore[method-assign]

    @property
    def requested(self) -> bool:
        """Whether this rank has received the signal."""
        return interrupts.ENDING.is_set()

    def _request(self, number: int, frame: FrameType | None) -> None:
        launcher = self.trainer.strategy.launcher
        if launcher is not None and not self.requested:
            launcher.kill(number)  # passes it on to the ranks that this process has started
        interrupts.ENDING.set()
        # Lightning ends a rank that has this flag, so several ranks set it together.
        self.trainer._signal_connector.received_sigterm = self.trainer.world_size == 1

    def raise_on_all(self) -> None:
        """Raise SIGTERMException if any rank has received the signal. Collective."""
        if self.trainer.strategy.reduce_boolean_decision(self.requested, all=False):
            self.trainer._signal_connector.received_sigterm = True
            raise SIGTERMException
