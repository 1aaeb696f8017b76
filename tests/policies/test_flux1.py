"""The policy and the sampler together are diffusers' ``FluxPipeline``, number for number."""

import pytest
import torch
from diffusers import FluxPipeline
from nano import PROMPTS, load_policy, relative_error
from torch import Tensor, nn

from solrl_lightning.policies.bf16 import BF16Linear, has_bf16_units
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.rollout.seeds import noise
from solrl_lightning.sampling import flux_sigmas, integrate, uniform_sigmas

SEEDS = torch.tensor([3, 4, 2**32 - 1])
STEPS, GUIDANCE = 4, 3.5


@pytest.fixture(params=["nano_folder", "dev_folder"])
def folder(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def sample(policy: Flux1) -> Tensor:
    conditioning = policy.encode(PROMPTS)
    with torch.no_grad():
        return integrate(
            lambda x, sigma: policy.velocity(policy.transformer, x, sigma, conditioning),
            policy.noise(SEEDS),
            policy.sigmas(STEPS),
        )


def reference_pipeline(folder: str) -> FluxPipeline:
    pipeline = FluxPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def packed(spatial: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H/2 * W/2, 4 C]: a token is a 2 x 2 patch, channel by channel, row by row."""
    batch, channels, height, width = spatial.shape
    patches = spatial.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return torch.einsum("bcyixj->byxcij", patches).reshape(batch, height // 2 * (width // 2), channels * 4)


def test_float32_images_are_those_of_the_diffusers_pipeline(folder: str) -> None:
    policy = load_policy(folder, guidance=GUIDANCE)
    policy.transformer.float()
    expected = reference_pipeline(folder)(
        prompt=PROMPTS,
        latents=policy.noise(SEEDS),
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        height=32,
        width=32,
        max_sequence_length=10,
        output_type="pt",
    ).images
    found = policy.decode(sample(policy))
    assert found.shape == (3, 3, 32, 32) and found.dtype == torch.float32
    assert expected.std() > 0.1  # not a flat picture
    # The pipeline scales sigma by 1000 and back, which may cost the last bit.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_bfloat16_latents_are_those_of_the_diffusers_pipeline_up_to_rounding(folder: str) -> None:
    policy, pipeline = load_policy(folder, guidance=GUIDANCE), reference_pipeline(folder)
    pipeline.transformer = pipeline.transformer.to(torch.bfloat16)
    conditioning = policy.encode(PROMPTS)
    expected = pipeline(
        prompt_embeds=conditioning["prompt_embeds"],
        pooled_prompt_embeds=conditioning["pooled"],
        latents=policy.noise(SEEDS),
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        height=32,
        width=32,
        output_type="latent",
    ).images
    assert expected.dtype == torch.bfloat16
    # The pipeline also rounds its latents after each step; ours stay in float32.
    assert relative_error(sample(policy), expected) < 2**-7


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


def test_noise_depends_on_its_seed_and_not_on_the_chunk(nano_folder: str) -> None:
    policy = load_policy(nano_folder)
    together = policy.noise(SEEDS)
    assert together.shape == (3, *policy.latent_shape) == (3, 16, 32) and together.dtype == torch.float32
    assert torch.equal(together, torch.cat([policy.noise(SEEDS[:1]), policy.noise(SEEDS[1:])]))
    assert torch.equal(policy.noise(SEEDS.flip(0)), together.flip(0))
    assert torch.equal(together, packed(noise(SEEDS, (8, 8, 8))))


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


def test_the_autoencoder_decodes_part_by_part(nano_folder: str) -> None:
    latents = load_policy(nano_folder).noise(SEEDS)
    whole = load_policy(nano_folder, decode_batch=3)
    expected, sizes = whole.decode(latents), []
    parts = load_policy(nano_folder, decode_batch=2)
    parts.pipeline.vae.decoder.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    torch.testing.assert_close(parts.decode(latents), expected, rtol=0, atol=1e-5)
    assert sizes == [2, 1]


def test_one_sigma_for_all_rows_equals_a_sigma_per_row(dev_folder: str) -> None:
    policy = load_policy(dev_folder)
    policy.transformer.float()
    conditioning, x = policy.encode(PROMPTS), policy.noise(SEEDS)
    with torch.no_grad():
        per_row = policy.velocity(policy.transformer, x, torch.tensor([0.9, 0.5, 0.1]), conditioning)
        for row, sigma in enumerate((0.9, 0.5, 0.1)):
            common = policy.velocity(policy.transformer, x, torch.tensor(sigma), conditioning)
            torch.testing.assert_close(per_row[row], common[row], rtol=0, atol=1e-5)
    assert relative_error(per_row[2], policy.velocity(policy.transformer, x, torch.tensor(0.9), conditioning)[2]) > 0.01


def test_velocities_are_float32_from_a_bfloat16_transformer(nano_folder: str) -> None:
    policy = load_policy(nano_folder)
    conditioning = policy.encode(PROMPTS)
    velocity = policy.velocity(policy.transformer, policy.noise(SEEDS), torch.tensor(0.5), conditioning)
    assert velocity.dtype == torch.float32 and velocity.shape == (3, 16, 32)
    assert {value.dtype for value in conditioning.values()} == {torch.bfloat16}


def test_a_prompts_embeddings_do_not_depend_on_its_companions(nano_folder: str) -> None:
    policy = load_policy(nano_folder)
    policy.transformer.float()  # the embeddings come in the transformer's dtype
    together = policy.encode(PROMPTS)
    assert together["prompt_embeds"].shape == (3, 10, 64) and together["pooled"].shape == (3, 64)
    for row, prompt in enumerate(PROMPTS):
        for name, value in policy.encode([prompt]).items():
            torch.testing.assert_close(value[0], together[name][row], rtol=0, atol=1e-5)
    assert relative_error(together["prompt_embeds"][0], together["prompt_embeds"][1]) > 0.1


def test_only_the_transformer_is_bfloat16_and_all_of_it_is_frozen(nano_folder: str) -> None:
    policy = load_policy(nano_folder)
    assert {parameter.dtype for parameter in policy.transformer.parameters()} == {torch.bfloat16}
    for component in (policy.pipeline.text_encoder, policy.pipeline.text_encoder_2, policy.pipeline.vae):
        assert {parameter.dtype for parameter in component.parameters()} == {torch.float32}
        assert not any(parameter.requires_grad for parameter in component.parameters())
    assert not any(parameter.requires_grad for parameter in policy.transformer.parameters())


def test_products_run_in_float32_exactly_where_the_cpu_has_no_bfloat16_units(nano_folder: str) -> None:
    transformer = load_policy(nano_folder).transformer
    linears = {type(module) for module in transformer.modules() if isinstance(module, nn.Linear)}
    assert linears == {nn.Linear if has_bf16_units() else BF16Linear}
