"""Solvers against the exact solution of a Gaussian flow, against diffusers' schedulers, and stopped and resumed."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from solrl_lightning.sampling import SOLVERS, NoiseSource, SolverState, integrate, start, steps
from solrl_lightning.seeds import step_noise
from tests.sigmas import shifted_sigmas, uniform_sigmas

MEAN, STD = 2.0, 0.5
every_solver = pytest.mark.parametrize("solver", list(SOLVERS))


def advance(velocity: Any, state: SolverState, *args: Any, **options: Any) -> SolverState:
    """Return the last state of `steps`, or ``state`` if there are none."""
    return reduce(lambda _, later: later, steps(velocity, state, *args, **options), state)


def gaussian_velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """Return E[eps - x0 | x_t = x] for data N(MEAN, STD^2), by linear regression of eps and x0 on x_t."""
    alpha = 1 - sigma
    offset = (x - alpha * MEAN) / (alpha**2 * STD**2 + sigma**2)
    return sigma * offset - (MEAN + alpha * STD**2 * offset)


def gaussian_path(z: Tensor, sigma: Tensor) -> Tensor:
    """Return the sample at quantile z of N((1 - sigma) MEAN, (1 - sigma)^2 STD^2 + sigma^2), which the flow keeps."""
    return (1 - sigma) * MEAN + z * ((1 - sigma) ** 2 * STD**2 + sigma**2).sqrt()


def curved_velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """Return a velocity without symmetry in x or sigma."""
    return torch.sin(2 * x + 3 * sigma) + 0.5 * x * sigma


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def slopes(solver: str, schedules: list[Tensor], left: int = 0) -> list[float]:
    """Return the orders of convergence between doubled numbers of steps, ``left`` steps before the end."""
    z, errors = noise(256), []
    for sigmas in schedules:
        stop = len(sigmas) - 1 - left
        state = advance(gaussian_velocity, start(gaussian_path(z, sigmas[0])), sigmas, solver, stop_step=stop)
        errors.append(float((state.x - gaussian_path(z, sigmas[stop])).square().mean().sqrt()))
    return [math.log2(coarse / fine) for coarse, fine in zip(errors, errors[1:], strict=False)]


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("dpm2", 2)])
def test_convergence_order_on_gaussian_flow(solver: str, order: int) -> None:
    """Between two noise levels inside (0, 1), where log-SNR is finite, with steps equal in log-SNR."""
    inside = [torch.sigmoid(torch.linspace(2.5, -2.5, count + 1)) for count in (32, 64, 128)]
    schedules = [torch.cat([sigmas, torch.zeros(1)]) for sigmas in inside]
    assert slopes(solver, schedules, left=1) == pytest.approx([order] * 2, abs=0.15)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1.0), ("dpm2", 1.8)])
def test_whole_trajectories_converge_to_exact_image(solver: str, order: float) -> None:
    """log-SNR is infinite at sigma = 1 and 0, which reduces dpm2's second order by a logarithm."""
    schedules = [uniform_sigmas(count) for count in (64, 128, 256)]
    assert slopes(solver, schedules) == pytest.approx([order] * 2, abs=0.15)


def integrate_with(scheduler: DPMSolverMultistepScheduler | FlowMatchEulerDiscreteScheduler, x: Tensor) -> Tensor:
    for i, timestep in enumerate(scheduler.timesteps):
        x = scheduler.step(curved_velocity(x, scheduler.sigmas[i]), timestep, x).prev_sample
    return x


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' use of NumPy 2
@pytest.mark.parametrize("steps", [1, 2, 3, 14, 15])
@pytest.mark.parametrize("from_pure_noise", [False, True])
def test_dpm2_matches_diffusers_multistep_scheduler(steps: int, from_pure_noise: bool) -> None:
    theirs = DPMSolverMultistepScheduler(
        solver_order=2, solver_type="midpoint", prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    theirs.set_timesteps(steps)
    if from_pure_noise:  # its own schedule starts at 0.999
        theirs.sigmas = shifted_sigmas(steps, 3.0)
    x = noise(4, 3, 8, 8)
    ours = integrate(curved_velocity, x, theirs.sigmas, "dpm2")
    torch.testing.assert_close(ours, integrate_with(theirs, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_euler_matches_diffusers_flow_match_scheduler(steps: int) -> None:
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs.set_timesteps(sigmas=uniform_sigmas(steps)[:-1].tolist())
    x = noise(4, 3, 8, 8)
    ours = integrate(curved_velocity, x, theirs.sigmas, "euler")
    torch.testing.assert_close(ours, integrate_with(theirs, x), rtol=0, atol=1e-6)


@every_solver
def test_single_step_and_straight_flow_are_exact(solver: str) -> None:
    x, x0 = noise(6), torch.arange(6.0)
    assert torch.equal(integrate(curved_velocity, x, uniform_sigmas(1), solver), x - curved_velocity(x, torch.ones(())))
    torch.testing.assert_close(integrate(lambda *_: x - x0, x, uniform_sigmas(7), solver), x0, rtol=0, atol=1e-6)


@every_solver
@pytest.mark.parametrize("stop", range(11))
def test_stop_and_resume_is_bit_exact(solver: str, stop: int) -> None:
    sigmas, x = shifted_sigmas(10, 3.0), noise(8, 5)
    states = [start(x), *steps(curved_velocity, start(x), sigmas, solver)]
    stopped = advance(curved_velocity, start(x), sigmas, solver, stop_step=stop)
    assert stopped.step == states[stop].step == stop and torch.equal(stopped.x, states[stop].x)
    resumed = advance(curved_velocity, stopped, sigmas, solver)
    assert torch.equal(resumed.x, states[10].x) and torch.equal(
        resumed.x, integrate(curved_velocity, x, sigmas, solver)
    )


@every_solver
def test_resumed_candidates_are_independent_of_dropped_ones(solver: str) -> None:
    sigmas, x, kept = shifted_sigmas(10, 3.0), noise(8, 5), torch.tensor([6, 1, 3])
    prefix = advance(curved_velocity, start(x), sigmas, solver, stop_step=4)
    images = advance(curved_velocity, prefix.take(kept), sigmas, solver).x
    assert torch.equal(images, integrate(curved_velocity, x[kept], sigmas, solver))
    by_mask = prefix.take(torch.tensor([True] + [False] * 7))
    assert torch.equal(by_mask.x, prefix.x[:1])
    assert by_mask.x0 is not None and prefix.x0 is not None and torch.equal(by_mask.x0, prefix.x0[:1])


def test_stopped_state_predicts_x0_from_latest_velocity() -> None:
    sigmas, x = uniform_sigmas(10), noise(8)
    before = advance(gaussian_velocity, start(x), sigmas, "dpm2", stop_step=3)
    after = advance(gaussian_velocity, before, sigmas, "dpm2", stop_step=4)
    assert start(x).x0 is None and after.x0 is not None
    torch.testing.assert_close(after.x0, before.x - sigmas[3] * gaussian_velocity(before.x, sigmas[3]))


def test_velocity_gets_float32_latents_and_scalar_sigma() -> None:
    levels: list[float] = []

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        assert x.dtype == torch.float32 and sigma.dtype == torch.float32 and sigma.shape == ()
        levels.append(float(sigma))
        return x.bfloat16()

    image = integrate(velocity, noise(3).bfloat16(), uniform_sigmas(4), "dpm2")
    assert levels == [1.0, 0.75, 0.5, 0.25] and image.dtype == torch.float32


@pytest.mark.parametrize(
    "sigmas", [[1.0, 0.5], [0.5, 0.5, 0.0], [0.2, 0.6, 0.0], [1.5, 0.5, 0.0], [0.0], [1.0, float("nan"), 0.0]]
)
def test_sigmas_not_descending_to_zero_raise(sigmas: list[float]) -> None:
    with pytest.raises(ValueError, match="sigmas must descend"):
        integrate(curved_velocity, noise(2), torch.tensor(sigmas))


def test_unknown_solver_and_invalid_stop_step_raise() -> None:
    with pytest.raises(ValueError, match="solver must be one of euler, dpm2; got 'heun'"):
        integrate(curved_velocity, noise(2), uniform_sigmas(2), "heun")
    state = advance(curved_velocity, start(noise(2)), uniform_sigmas(4), stop_step=2)
    for stop in (1, 5):
        with pytest.raises(ValueError, match=f"2 to 4; got {stop}"):
            advance(curved_velocity, state, uniform_sigmas(4), stop_step=stop)


def test_custom_solver_draws_noise_of_its_step() -> None:
    """x <- x + (step + 1) noise(step), whatever the velocity."""

    def walk(state: SolverState, velocity: Tensor, sigmas: Sequence[float], noise: NoiseSource | None) -> SolverState:
        assert noise is not None
        return SolverState(state.x + (state.step + 1) * noise(state.step), state.x, state.step + 1)

    def walked(seeds: Tensor) -> Tensor:
        source, x = (lambda step: step_noise(seeds, step, (3,))), torch.zeros(len(seeds), 3)
        return advance(curved_velocity, start(x), uniform_sigmas(4), walk, noise=source).x

    seeds = torch.tensor([5, 6])
    expected = sum((step + 1) * step_noise(seeds, step, (3,)) for step in range(4))
    torch.testing.assert_close(walked(seeds), expected)
    assert torch.equal(walked(seeds)[1:], walked(seeds[1:]))
