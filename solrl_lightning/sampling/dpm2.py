"""The second-order multistep solver `dpm2`: DPM-Solver++(2M) of Lu et al. 2022 (arXiv 2211.01095), midpoint form.

Variant: deterministic, data prediction, with alpha = 1 - sigma and lambda = log(alpha / sigma); one velocity
evaluation a step, the previous x0 prediction as history; first order in the first step and in the last one (to
sigma = 0, where lambda is infinite). This is what DiffusionNFT and Sol-RL sample with, and what diffusers'
`DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", solver_order=2, solver_type="midpoint",
prediction_type="flow_prediction", use_flow_sigmas=True, final_sigmas_type="zero")` computes.

A schedule that starts at sigma = 1 exactly has lambda = -inf there: the second step's history then has weight 0, so
that step is first order too. This is the limit of the formula; the published sampler computes the same.

The update (their Algorithm 2) is sigma_t / sigma_s x + alpha_t (1 - e^-h) [x0 + (x0 - x0_before) h / (2 h_before)].
Its first two terms are the Euler step, since alpha_t (1 - e^-h) = alpha_t - alpha_s sigma_t / sigma_s and
alpha + sigma = 1; so the step is written as Euler plus a correction, which needs no exponential and is exact at
sigma = 1 and sigma = 0.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from solrl_lightning.sampling.euler import euler_step
from solrl_lightning.sampling.state import NoiseSource, SolverState


def dpm2_step(
    state: SolverState, velocity: Tensor, sigmas: Sequence[float], noise: NoiseSource | None = None
) -> SolverState:
    """Return the state at sigmas[i + 1], i = state.step, from velocity [B, ...] at (x, sigmas[i])."""
    after = euler_step(state, velocity, sigmas)
    weight = _correction_weight(sigmas, state.step)
    if state.x0 is None or after.x0 is None or weight == 0:
        return after
    return after._replace(x=after.x + weight * (after.x0 - state.x0))


def _correction_weight(sigmas: Sequence[float], i: int) -> float:
    """Return alpha_t (1 - e^-h) h / (2 h_before) of the step from sigmas[i] to sigmas[i+1]; 0 if it is first order."""
    if i == 0 or sigmas[i - 1] == 1 or sigmas[i + 1] == 0:
        return 0.0
    before, here, after = sigmas[i - 1], sigmas[i], sigmas[i + 1]
    h = _lambda(after) - _lambda(here)
    h_before = _lambda(here) - _lambda(before)
    return 0.5 * ((1 - after) - (1 - here) * after / here) * h / h_before


def _lambda(sigma: float) -> float:
    """Return half the log signal-to-noise ratio, log(alpha / sigma)."""
    return math.log1p(-sigma) - math.log(sigma)
