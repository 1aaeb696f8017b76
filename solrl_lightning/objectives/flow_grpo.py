"""Flow-GRPO (Liu et al. 2025, arXiv 2505.05470): GRPO on an SDE with the marginals of the flow.

Differs from the published code: the last step, which is not trained on, takes no noise (as in its Flow-GRPO-Fast), and
the standard deviation of the advantages is over all prompts, one of its options.
"""

from dataclasses import dataclass

from torch import Tensor

from solrl_lightning.errors import UserError
from solrl_lightning.objectives.grpo import GRPO
from solrl_lightning.options.rules import Count, Positive, Seed
from solrl_lightning.sampling.sde import flow_grpo_transition
from solrl_lightning.seeds import permutation


@dataclass(frozen=True, kw_only=True)
class FlowGRPO(GRPO):
    """GRPO with `flow_grpo_transition`.

    Args:
        noise_level: a, the factor of the noise scale.
        window: number of stochastic steps, which lie in the first half of the trajectory at a place that depends on
            seed and iteration (Flow-GRPO-Fast); None: all but the last step.
        seed: of the window's place.
    """

    noise_level: Positive
    window: Count | None
    seed: Seed

    def transitions(self, num_steps: int, iteration: int) -> range:
        every = super().transitions(num_steps, iteration)
        if self.window is None:
            return every
        most = num_steps // 2
        if self.window > most:
            raise UserError(
                f"objective.window={self.window} is invalid: it must be at most {most}, half of "
                f"family.regenerate.steps={num_steps}. Set objective.window=null for all steps."
            )
        places = most - self.window + 1
        first = int(permutation(f"window/{self.seed}/{iteration}", places)[0])
        return range(first, first + self.window)

    def transition(self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
        # Only the first step has sigma = 1, so its sigma_next is the schedule's second value.
        return flow_grpo_transition(
            x, velocity.float(), sigma, sigma_next, noise_level=self.noise_level, sigma_at_one=sigma_next
        )
