"""Classifier-free guidance around a policy's velocity."""

from collections.abc import Callable

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from nano import PROMPTS, load_nano
from torch import Tensor, nn

from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.guidance import guided
from solrl_lightning.sampling import integrate

SEEDS = torch.tensor([3, 4, 5])
STEPS, SCALE = 3, 4.5


def times_embedding(transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
    return x * conditioning["embeds"] + sigma


def test_velocity_is_extrapolated_from_the_unconditional_one() -> None:
    x, embeds, negative = torch.randn(4, 6), torch.randn(4, 6), torch.randn(1, 6)
    call = (nn.Identity(), x, torch.tensor(0.3), {"embeds": embeds})
    for scale in (0.0, 0.5, 1.0, 7.5):
        expected = x * (negative + scale * (embeds - negative)) + 0.3
        found = guided(times_embedding, {"embeds": negative}, scale)(*call)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_scale_1_takes_one_forward_pass() -> None:
    assert guided(times_embedding, {"embeds": torch.zeros(1, 6)}, 1.0) is times_embedding


@pytest.mark.parametrize("model", ["sd3", "sana"])
def test_latents_are_those_of_the_diffusers_pipeline_with_guidance(folder_of: Callable[[str], str], model: str) -> None:
    policy = load_nano(model, folder_of(model))
    policy.transformer.float()
    theirs = policy.pipeline_class.from_pretrained(folder_of(model), dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    options: dict[str, object] = dict(height=32, width=32, num_inference_steps=STEPS, max_sequence_length=10)
    if model == "sana":
        theirs.scheduler = FlowMatchEulerDiscreteScheduler()
        options |= dict(use_resolution_binning=False, complex_human_instruction=None)
        options |= dict(sigmas=policy.sigmas(STEPS)[:-1].tolist())
    expected = theirs(
        PROMPTS, negative_prompt="", guidance_scale=SCALE, latents=policy.noise(SEEDS), output_type="latent", **options
    ).images

    def sample(scale: float) -> Tensor:
        velocity, conditioning = guided(policy.velocity, policy.encode([""]), scale), policy.encode(PROMPTS)
        return integrate(
            lambda x, sigma: velocity(policy.transformer, x, sigma, conditioning),
            policy.noise(SEEDS),
            policy.sigmas(STEPS),
        )

    with torch.no_grad():
        torch.testing.assert_close(sample(SCALE), expected, rtol=0, atol=1e-4)
        assert (sample(1.0) - expected).abs().max() > 0.01
