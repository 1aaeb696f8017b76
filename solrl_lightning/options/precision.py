"""``precision``: the number format of the shadow."""

from solrl_lightning.names import check_backend
from solrl_lightning.options.rules import Group


class Precision(Group):
    name: str
    """Format of the quantised layers; auto: the lowest that this machine computes in."""
    backend: str
    """What computes it: torch, transformer_engine (nvfp4), or emulated, which runs anywhere; auto: the fastest here."""

    def check(self) -> None:
        check_backend(self.name, self.backend)
