import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from solrl_lightning.sampling import flux_sigmas, shifted_sigmas, uniform_sigmas


def test_uniform_levels_are_equally_spaced_with_exact_ends() -> None:
    assert uniform_sigmas(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert uniform_sigmas(1).tolist() == [1.0, 0.0]
    assert uniform_sigmas(10).dtype == torch.float32


def test_shift_three_moves_the_middle_level_to_three_quarters() -> None:
    assert shifted_sigmas(4, 3.0).tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0])


@pytest.mark.parametrize("steps", [1, 6, 10, 28])
def test_shifted_levels_agree_with_the_scheduler_of_sd3(steps: int) -> None:
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist())
    torch.testing.assert_close(shifted_sigmas(steps, 3.0), theirs.sigmas, rtol=0, atol=2e-7)


@pytest.mark.parametrize("steps", [1, 6, 10, 28])
@pytest.mark.parametrize("image_tokens", [16, 256, 1024, 4096])
def test_dynamic_levels_agree_with_the_flux_pipeline(steps: int, image_tokens: int) -> None:
    theirs = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), mu=calculate_shift(image_tokens))
    torch.testing.assert_close(flux_sigmas(steps, image_tokens), theirs.sigmas, rtol=0, atol=2e-7)


def test_dynamic_shift_follows_the_configuration_of_the_scheduler() -> None:
    ours = flux_sigmas(5, 64, base_tokens=16, max_tokens=64, base_shift=0.0, max_shift=1.0)
    torch.testing.assert_close(ours, shifted_sigmas(5, torch.e))
    assert torch.equal(flux_sigmas(5, 16, base_tokens=16, max_tokens=64, base_shift=0.0), uniform_sigmas(5))


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1; got 0"):
        uniform_sigmas(0)
    with pytest.raises(ValueError, match="must be positive; got 0"):
        shifted_sigmas(3, 0.0)
