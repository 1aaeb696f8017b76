"""This project with marks: ``python run_product.py OVERRIDE ...``, by the interpreter of its checkout."""

import sys
from typing import Any

from measure import mark, redness
from torch import Tensor

from solrl_lightning.rewards.base import Reward


class Redness(Reward):
    name = "red"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return redness(images)


if __name__ == "__main__":
    from solrl_lightning.__main__ import main
    from solrl_lightning.training.loop import ExploreTrainLoop

    sys.modules["run_product"] = sys.modules["__main__"]  # imported by name for its reward
    advance, roll_out = ExploreTrainLoop.advance, ExploreTrainLoop.roll_out

    def marked_roll_out(self: ExploreTrainLoop) -> Any:
        rows = roll_out(self)
        mark("train")
        return rows

    def marked_advance(self: ExploreTrainLoop) -> None:
        mark("rollout")
        advance(self)
        mark("rest")

    ExploreTrainLoop.advance, ExploreTrainLoop.roll_out = marked_advance, marked_roll_out
    sys.exit(main())
