"""What is SD3's own: the shift of the noise levels, three text encoders, unpacked latents."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from nano import NANO, PROMPTS, load_nano, policy_options
from torch import Tensor

from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.sd3 import SD3
from solrl_lightning.seeds import noise
from tests.sigmas import shifted_sigmas

SEEDS = torch.tensor([3, 4])


@pytest.fixture(scope="module")
def policy(folder_of: object) -> PipelineAdapter:
    return load_nano("sd3", folder_of("sd3"))  # type: ignore[operator]


def test_sigmas_are_those_that_the_scheduler_gives_the_pipeline(policy: PipelineAdapter) -> None:
    before = policy.pipeline.scheduler.sigmas.clone()
    for steps in (1, 6, 10):
        found = policy.sigmas(steps)
        assert found.shape == (steps + 1,) and found[0] == 1 and found[-1] == 0
        # Levels between 1 and the scheduler's smallest one, which has been shifted once already: s t / (1 + (s - 1) t).
        smallest = float(shifted_sigmas(1000, 3.0)[-2])
        t = torch.linspace(1, smallest, steps, dtype=torch.float64)
        torch.testing.assert_close(found[:-1], (3 * t / (1 + 2 * t)).float(), rtol=0, atol=1e-6)
    assert torch.equal(policy.pipeline.scheduler.sigmas, before)


def test_embeddings_are_both_clips_and_then_t5(policy: PipelineAdapter) -> None:
    conditioning = policy.encode(PROMPTS)
    embeds, pipeline = conditioning["prompt_embeds"].float(), policy.pipeline
    assert embeds.shape == (3, 11 + 10, 64) and conditioning["pooled"].shape == (3, 64)
    ids = pipeline.tokenizer_3(PROMPTS, padding="max_length", max_length=10, return_tensors="pt").input_ids
    with torch.no_grad():
        t5 = pipeline.text_encoder_3(ids)[0]
    torch.testing.assert_close(embeds[:, 11:], t5, rtol=0, atol=2**-6)
    clip = embeds[:, :11]
    assert not torch.equal(clip[..., :32], clip[..., 32:])  # two encoders of their own


def test_decode_unscales_and_maps_to_the_unit_interval(policy: PipelineAdapter) -> None:
    assert policy.latent_shape == (16, 8, 8)
    latents = policy.noise(SEEDS)
    assert torch.equal(latents, noise(SEEDS, (16, 8, 8)))
    with torch.no_grad():
        decoded = policy.pipeline.vae.decode(latents / 1.5305 + 0.0609).sample
    torch.testing.assert_close(policy.decode(latents), ((decoded + 1) / 2).clamp(0, 1), rtol=0, atol=1e-5)


class Framed(SD3):
    """Decodes with an autoencoder of videos, whose latents have statistics by channel: [B, C, frames, H, W]."""

    def decode_latents(self, x: Tensor, vae: Any) -> Tensor:
        mean, std = (torch.tensor(vae.config[name]).view(-1, 1, 1) for name in ("latents_mean", "latents_std"))
        return vae.decode((x * std + mean).unsqueeze(2).to(vae.dtype)).sample[:, :, 0]


def test_a_policy_owns_its_decode_call(folder_of: Callable[[str], str]) -> None:
    policy = Framed(**policy_options("sd3") | NANO | dict(pretrained=folder_of("sd3")))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLQwenImage(
            base_dim=8, z_dim=16, dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[False, False]
        )
    policy.pipeline.vae = vae
    latents = policy.noise(torch.tensor([3, 4, 5]))
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    with torch.no_grad():
        frames = vae.decode((latents * std[:, None, None] + mean[:, None, None])[:, :, None]).sample
    assert frames.shape == (3, 3, 1, 32, 32) and frames.std() > 0.01
    expected = (frames[:, :, 0] / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(policy.decode(latents), expected, rtol=0, atol=1e-5)
