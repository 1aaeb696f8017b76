"""What is SANA's own: uniform noise levels, the mask of the prompt, a 32-fold autoencoder, a possible learned sigma."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import SanaTransformer2DModel
from nano import PROMPTS, build_nano_sana, load_nano

from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.seeds import noise
from tests.sigmas import shifted_sigmas, uniform_sigmas

SEEDS = torch.tensor([3, 4, 5])


@pytest.fixture(scope="module")
def policy(folder_of: Callable[[str], str]) -> PipelineAdapter:
    policy = load_nano("sana", folder_of("sana"), max_sequence_length=40)
    policy.transformer.float()
    return policy


def test_sigmas_are_uniform_or_have_the_shift_that_the_options_say(policy: PipelineAdapter, folder_of: object) -> None:
    torch.testing.assert_close(policy.sigmas(10), uniform_sigmas(10), rtol=0, atol=1e-6)
    shifted = load_nano("sana", folder_of("sana"), flow_shift=3.0)  # type: ignore[operator]
    torch.testing.assert_close(shifted.sigmas(10), shifted_sigmas(10, 3.0), rtol=0, atol=1e-6)


def test_padding_has_no_influence(policy: PipelineAdapter) -> None:
    conditioning = policy.encode(PROMPTS)
    mask = conditioning["prompt_mask"].bool()
    assert mask.sum(1).tolist() == [len(prompt) + 1 for prompt in PROMPTS]  # nano's tokens are letters
    x, sigma = policy.noise(SEEDS), torch.tensor(0.6)
    with torch.no_grad():
        expected = policy.velocity(policy.transformer, x, sigma, conditioning)
        for part, changes in ((~mask, False), (mask, True)):
            embeds = conditioning["prompt_embeds"].clone()
            embeds[part] += 1.0
            found = policy.velocity(policy.transformer, x, sigma, conditioning | {"prompt_embeds": embeds})
            assert bool((found - expected).abs().max() > 1e-3) == changes


def test_decode_unscales_and_maps_to_the_unit_interval(policy: PipelineAdapter) -> None:
    latents = policy.noise(SEEDS)
    assert policy.latent_shape == (8, 4, 4) and torch.equal(latents, noise(SEEDS, (8, 4, 4)))
    with torch.no_grad():
        decoded = policy.pipeline.vae.decode(latents / 0.41407).sample
    torch.testing.assert_close(policy.decode(latents), ((decoded + 1) / 2).clamp(0, 1), rtol=0, atol=1e-5)


def test_a_learned_sigma_is_left_out_and_timesteps_are_scaled_as_the_model_wants(tmp_path: Path) -> None:
    pipeline = build_nano_sana()
    with torch.random.fork_rng(devices=[]):
        options = {name: value for name, value in pipeline.transformer.config.items() if not name.startswith("_")}
        transformer = SanaTransformer2DModel(**options | {"out_channels": 16, "timestep_scale": 0.5})
    pipeline.register_modules(transformer=transformer)
    pipeline.save_pretrained(tmp_path)
    policy = load_nano("sana", str(tmp_path))
    policy.transformer.float()
    conditioning, x = policy.encode(PROMPTS), policy.noise(SEEDS)
    with torch.no_grad():
        found = policy.velocity(policy.transformer, x, torch.tensor(0.8), conditioning)
        whole = policy.transformer(
            x,
            encoder_hidden_states=conditioning["prompt_embeds"],
            encoder_attention_mask=conditioning["prompt_mask"],
            timestep=torch.full((3,), 400.0),
        ).sample
    assert whole.shape == (3, 16, 4, 4) and torch.equal(found, whole[:, :8])
