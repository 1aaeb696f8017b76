"""Seeds that one exploration selects for several iterations (``family.explore.every`` above 1).

Shapes: P prompts of all ranks, S sets, K seeds of a set.
"""

from typing import Any

import torch
from torch import Tensor

from solrl_lightning.data.prompts import PromptSchedule
from solrl_lightning.rollout.explore import Kept


class KeptSeeds:
    """The seeds that the next iterations train on without another exploration, equal on all ranks.

    Args:
        schedule: tells which prompts an iteration repeats.
        sets: that an exploration selects: 1, which all iterations take, or ``schedule.uses``, one for each.
    """

    def __init__(self, schedule: PromptSchedule, sets: int) -> None:
        self.schedule, self.sets = schedule, sets
        self._left: dict[str, Tensor] = {}  # prompt of the next iteration -> float64 [S, K, 2]: seeds and merits
        self._left_after: dict[str, Tensor] = {}  # the same after the current iteration, which may be interrupted

    def reused(self, iteration: int) -> int:
        """Return how many prompts of the iteration, its last ones, have kept seeds."""
        return self.schedule.repeated(iteration) if self._left else 0

    def next_set(self, prompts: list[str]) -> Kept:
        """Return the set [P, 1, K] of each of the prompts that the current iteration trains on."""
        seeds, merits = torch.stack([self._left[prompt][:1] for prompt in prompts]).unbind(-1)
        return Kept(seeds.long(), merits.float())

    def keep(self, iteration: int, explored: Kept) -> None:
        """Keep for the next iteration what is left, with that of the prompts that this one has ``explored``."""
        table = torch.stack([explored.seeds.double(), explored.merits.double()], dim=-1)
        table = table.repeat(1, self.schedule.uses // self.sets, 1, 1)
        prompts = self.schedule.for_iteration(iteration)[: len(table)]
        left = {prompt: sets[1:] for prompt, sets in (self._left | dict(zip(prompts, table, strict=True))).items()}
        first = self.schedule.per_iteration - self.schedule.repeated(iteration + 1)
        self._left_after = {prompt: left[prompt] for prompt in self.schedule.for_iteration(iteration + 1)[first:]}

    def advance(self) -> None:
        """Begin the next iteration."""
        self._left = self._left_after

    def state_dict(self) -> dict[str, Any]:
        return dict(self._left)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._left = dict(state_dict)
