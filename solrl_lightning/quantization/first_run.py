"""The family and the precision of a first run, by the card: what plan, doctor, README and docs/precision.md print."""

from typing import NamedTuple

from solrl_lightning.quantization.backends import Hardware, choose_precision


class FirstRun(NamedTuple):
    """Options of a first run."""

    family: str
    precision: str | None  # of the shadow, of a family that has one
    why: str

    @property
    def options(self) -> list[str]:
        """The options as on the command line."""
        return [f"family={self.family}", *([f"precision={self.precision}"] if self.precision else [])]


def first_run(hardware: Hardware, shadow_fits: bool = True) -> FirstRun:
    """Return the options of a first run on ``hardware``.

    For a prompt ``sol_rl`` takes 576 passes of the shadow and 240 in BF16, ``prefix`` 528 in BF16: a shadow saves time
    if its pass takes at most half of BF16's. By estimate it takes .7 in FP8 (FLUX.1 on an H100: 206 s an iteration,
    187 with ``prefix``) and .8 in INT8. In NVFP4 both families are equal within the error of the estimate, and
    ``sol_rl`` is the published one.

    Args:
        shadow_fits: whether the plan has room for the shadow.
    """
    precision = choose_precision(hardware)
    if hardware.type == "cpu":
        return FirstRun("sol_rl", precision, f"{precision.upper()} is emulated and ranks as on a GPU that has it")
    if precision == "nvfp4" and shadow_fits:
        return FirstRun("sol_rl", precision, "FP4 units make a pass of the shadow cheap, as published")
    why = "the plan has no room for a shadow" if precision == "nvfp4" else "no FP4 units make a pass of a shadow cheap"
    return FirstRun("prefix", None, f"{why}; BF16 explores with the first steps of its trajectories")
