"""What passes between the stages of an iteration. Shapes: P prompts of this rank, N pool, K kept."""

from typing import NamedTuple

from torch import Tensor


class Candidates(NamedTuple):
    """Generated images of a set of seeds, with their rewards."""

    seeds: Tensor  # [P, N] int64
    latents: Tensor  # [P, N, ...] float32, the image latents x0
    rewards: Tensor  # [P, N] float32


class Rollouts(NamedTuple):
    """The training samples of an iteration."""

    prompts: list[str]  # P texts
    seeds: Tensor  # [P, K] int64
    latents: Tensor  # [P, K, ...] float32, the image latents x0
    proxy_rewards: Tensor  # [P, K] float32, by which the samples were selected
    rewards: Tensor  # [P, K] float32, of these very latents
    advantages: Tensor  # [P, K] float32, from `rewards` alone
