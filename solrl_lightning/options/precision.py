"""``precision``: the number format of the shadow."""

from solrl_lightning.names import check_backend
from solrl_lightning.options.rules import Broken, CountOrZero, Group


class Precision(Group):
    name: str
    """Format of the quantised layers; auto: the lowest that this machine computes in."""
    backend: str
    """What computes it; auto: the fastest here."""
    low_rank: CountOrZero
    """Rank of the base weights' part in a 16-bit branch, which the LoRA joins; 0: the LoRA is merged and quantised."""

    def check(self) -> None:
        check_backend(self.name, self.backend)
        if self.name == "bf16" and self.low_rank:
            raise Broken("precision=bf16 quantises nothing.", "low_rank", "Leave it out, or choose another precision.")
