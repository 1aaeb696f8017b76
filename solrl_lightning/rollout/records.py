"""What passes between the stages of an iteration. Shapes: P prompts of this rank, N pool, K kept, R rewards."""

from typing import NamedTuple

from torch import Tensor

from solrl_lightning.rollout.select import take


class Candidates(NamedTuple):
    """Generated images of a set of seeds, with their rewards."""

    seeds: Tensor  # [P, N] int64
    latents: Tensor  # [P, N, ...] float32, the image latents x0, or their prediction where the trajectory was stopped
    rewards: Tensor  # [P, N] float32, the weighted sum of `scores`
    scores: Tensor  # [P, N, R] float32, what each reward said
    standing: Tensor  # [P, N, ...] float32, where the trajectory stands; `latents` itself at its end

    def take(self, chosen: Tensor) -> "Candidates":
        """The chosen [P, K] of them."""
        return Candidates(*(take(values, chosen) for values in self))


class Rollouts(NamedTuple):
    """The training samples of an iteration."""

    prompts: list[str]  # P texts
    seeds: Tensor  # [P, K] int64
    latents: Tensor  # [P, K, ...] float32, the image latents x0
    proxy_rewards: Tensor  # [P, K] float32, by which the samples were selected
    rewards: Tensor  # [P, K] float32, of these very latents
    scores: Tensor  # [P, K, R] float32, of which `rewards` are the weighted sum
    advantages: Tensor  # [P, K] float32, from `rewards` alone
