"""DanceGRPO (Xue et al. 2025, arXiv 2505.07818): GRPO on an SDE with constant noise scale.

As in the published code, the last step is not trained on and its predicted x0 is the image, so that it takes no noise.
"""

from dataclasses import dataclass

from torch import Tensor

from solrl_lightning.objectives.advantages import AllReduce, per_prompt_advantages
from solrl_lightning.objectives.grpo import GRPO
from solrl_lightning.options.rules import Positive
from solrl_lightning.sampling.sde import dance_grpo_transition


@dataclass(frozen=True, kw_only=True)
class DanceGRPO(GRPO):
    """GRPO with `dance_grpo_transition` and advantages per prompt.

    Args:
        eta: noise scale.
        shared_noise: start the candidates of a prompt from one noise. Families that explore rank start noises, so
            their candidates keep their own.
    """

    eta: Positive
    shared_noise: bool

    def transition(self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
        return dance_grpo_transition(x, velocity.float(), sigma, sigma_next, eta=self.eta)

    def advantages(self, merits: Tensor, all_reduce_sum: AllReduce = lambda total: total) -> Tensor:
        return per_prompt_advantages(merits)
