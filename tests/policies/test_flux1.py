"""What is FLUX.1's own: packed latents, guidance embedding, resolution shift. See test_pipelines.py for the rest."""

import torch
from diffusers import FluxPipeline
from nano import PROMPTS, load_policy, relative_error
from torch import Tensor, nn

from solrl_lightning.policies.bf16 import BF16Linear, has_fast_bf16_products
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.sampling import integrate
from solrl_lightning.seeds import noise
from tests.sigmas import flux_sigmas, uniform_sigmas

SEEDS = torch.tensor([3, 4, 2**32 - 1])
STEPS, GUIDANCE = 4, 3.5


def sample(policy: Flux1) -> Tensor:
    conditioning = policy.encode(PROMPTS)
    with torch.no_grad():
        return integrate(
            lambda x, sigma: policy.velocity(policy.transformer, x, sigma, conditioning),
            policy.noise(SEEDS),
            policy.sigmas(STEPS),
        )


def packed(spatial: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H/2 * W/2, 4 C]: a token is a 2 x 2 patch, channel by channel, row by row."""
    batch, channels, height, width = spatial.shape
    patches = spatial.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return torch.einsum("bcyixj->byxcij", patches).reshape(batch, height // 2 * (width // 2), channels * 4)


def test_images_with_guidance_and_shift_are_those_of_the_diffusers_pipeline(dev_folder: str) -> None:
    policy = load_policy(dev_folder, guidance=GUIDANCE, dtypes={"default": "float32"})
    pipeline = FluxPipeline.from_pretrained(dev_folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    options = dict(num_inference_steps=STEPS, guidance_scale=GUIDANCE, height=32, width=32, max_sequence_length=10)
    latents = sample(policy)
    expected = pipeline(PROMPTS, latents=policy.noise(SEEDS), output_type="latent", **options).images
    assert torch.equal(latents, expected)
    images = pipeline(PROMPTS, latents=policy.noise(SEEDS), output_type="pt", **options).images
    torch.testing.assert_close(policy.decode(latents), images, rtol=0, atol=1e-5)


def test_the_guidance_embedding_gets_the_policys_guidance(dev_folder: str) -> None:
    weak, strong = load_policy(dev_folder, guidance=1.0), load_policy(dev_folder, guidance=GUIDANCE)
    assert relative_error(sample(weak), sample(strong)) > 0.02


def test_sigmas_are_uniform_without_a_resolution_shift(nano_folder: str) -> None:
    torch.testing.assert_close(load_policy(nano_folder).sigmas(10), uniform_sigmas(10), rtol=0, atol=1e-6)


def test_sigmas_follow_the_schedulers_own_resolution_shift(dev_folder: str) -> None:
    policy = load_policy(dev_folder)
    expected = flux_sigmas(7, image_tokens=16, base_tokens=8, max_tokens=64)
    torch.testing.assert_close(policy.sigmas(7), expected, rtol=0, atol=1e-6)
    before = policy.pipeline.scheduler.sigmas.clone()
    policy.sigmas(3)
    assert torch.equal(policy.pipeline.scheduler.sigmas, before)
    torch.testing.assert_close(policy.sigmas(7), expected, rtol=0, atol=1e-6)


def test_noise_is_packed_two_by_two(nano_folder: str) -> None:
    policy = load_policy(nano_folder)
    assert policy.latent_shape == (16, 32)
    assert torch.equal(policy.noise(SEEDS), packed(noise(SEEDS, (8, 8, 8))))


def test_decode_unpacks_unscales_and_maps_to_the_unit_interval(nano_folder: str) -> None:
    policy = load_policy(nano_folder)
    latents = noise(SEEDS, (8, 8, 8))
    with torch.no_grad():
        decoded = policy.pipeline.vae.decode(latents / 0.3611 + 0.1159).sample
    images = policy.decode(packed(latents))
    torch.testing.assert_close(images, ((decoded + 1) / 2).clamp(0, 1), rtol=0, atol=1e-5)
    assert images.min() >= 0 and images.max() <= 1
    beyond = policy.decode(packed(1e3 * latents))
    assert beyond.min() == 0 and beyond.max() == 1


def test_velocities_are_float32_from_a_bfloat16_transformer(nano_folder: str) -> None:
    policy = load_policy(nano_folder)
    conditioning = policy.encode(PROMPTS)
    velocity = policy.velocity(policy.transformer, policy.noise(SEEDS), torch.tensor(0.5), conditioning)
    assert velocity.dtype == torch.float32 and velocity.shape == (3, 16, 32)
    assert {parameter.dtype for parameter in policy.transformer.parameters()} == {torch.bfloat16}


def test_products_run_in_float32_exactly_where_the_cpu_has_no_bfloat16_units(nano_folder: str) -> None:
    transformer = load_policy(nano_folder).transformer
    linears = {type(module) for module in transformer.modules() if isinstance(module, nn.Linear)}
    assert linears == {nn.Linear if has_fast_bf16_products() else BF16Linear}
