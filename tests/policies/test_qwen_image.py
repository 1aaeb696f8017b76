"""What is Qwen-Image's own: prompts of different lengths, the terminal level, an autoencoder of videos, guidance."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from nano import load_nano
from safetensors.torch import load_file

from solrl_lightning.errors import UserError
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.qwen_image import with_conditional_norm
from solrl_lightning.sampling import integrate
from solrl_lightning.seeds import noise
from tests.sigmas import shifted_sigmas

SEEDS = torch.tensor([3, 4, 5])
TEXTS = ["a red circle above a blue square", "a circle", "a green triangle"]
LENGTHS = [7 + 5, 2 + 5, 3 + 5]  # words, and the five tokens of the template behind them


@pytest.fixture(scope="module")
def policy(folder_of: Callable[[str], str]) -> PipelineAdapter:
    """With room for the longest prompt; in float32."""
    return load_nano("qwen_image", folder_of("qwen_image"), max_sequence_length=16, dtypes={"default": "float32"})


def test_prompts_are_stored_at_their_own_length_and_padded_to_one(
    policy: PipelineAdapter, folder_of: Callable[[str], str], tmp_path: Path
) -> None:
    options = dict(max_sequence_length=16, dtypes={"default": "float32"}, embeddings=str(tmp_path))
    storing = load_nano("qwen_image", folder_of("qwen_image"), **options)
    expected = policy.encode(TEXTS)
    assert expected["prompt_embeds_mask"].sum(1).tolist() == LENGTHS
    assert expected["prompt_embeds"].shape == (3, 16, 64)
    assert not expected["prompt_embeds"][~expected["prompt_embeds_mask"]].any()
    for _ in ("embedded", "read"):
        found = storing.encode(TEXTS)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    stored = [load_file(file)["prompt_embeds"].shape for file in tmp_path.glob("*.safetensors")]
    assert sorted(stored) == [(length, 64) for length in sorted(LENGTHS)]
    (row,) = policy.encode(TEXTS[1:2])["prompt_embeds_mask"]  # alone it is padded as well
    assert row.tolist() == [True] * 7 + [False] * 9


def test_images_of_prompts_of_different_lengths_are_those_of_the_diffusers_pipeline(
    policy: PipelineAdapter, folder_of: Callable[[str], str]
) -> None:
    pipeline = QwenImagePipeline.from_pretrained(folder_of("qwen_image"), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    options = dict(num_inference_steps=4, true_cfg_scale=1.0, height=32, width=32, output_type="latent")
    expected = pipeline(TEXTS, latents=policy.noise(SEEDS), **options).images
    conditioning = policy.encode(TEXTS)
    with torch.no_grad():
        found = integrate(
            lambda x, sigma: policy.velocity(policy.transformer, x, sigma, conditioning),
            policy.noise(SEEDS),
            policy.sigmas(4),
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # padded to 16 here and to 12 there


def test_padding_has_no_influence(policy: PipelineAdapter) -> None:
    conditioning, x, sigma = policy.encode(TEXTS), policy.noise(SEEDS), torch.tensor(0.6)
    mask = conditioning["prompt_embeds_mask"]
    with torch.no_grad():
        expected = policy.velocity(policy.transformer, x, sigma, conditioning)
        for part, changes in ((~mask, False), (mask, True)):
            embeds = conditioning["prompt_embeds"].clone()
            embeds[part] += torch.randn(64)  # a constant would vanish in the norm
            found = policy.velocity(policy.transformer, x, sigma, conditioning | {"prompt_embeds": embeds})
            assert bool((found - expected).abs().max() > 1e-3) == changes


def test_sigmas_end_at_the_schedulers_terminal(policy: PipelineAdapter) -> None:
    for steps in (4, 10):
        mu = 0.5 + (0.9 - 0.5) / (64 - 8) * (16 - 8)
        levels = 1 - shifted_sigmas(steps, math.exp(mu)).double()[:-1]
        expected = torch.cat([1 - levels * (1 - 0.02) / levels[-1], torch.zeros(1)]).float()
        torch.testing.assert_close(policy.sigmas(steps), expected, rtol=0, atol=1e-6)
    assert policy.sigmas(1).tolist() == [1.0, 0.0]


def test_decode_is_that_of_a_video_of_one_frame_with_the_autoencoders_statistics(policy: PipelineAdapter) -> None:
    vae, spatial = policy.pipeline.vae, noise(SEEDS, (16, 8, 8))
    assert policy.latent_shape == (16, 64)
    mean, std = (torch.tensor(vae.config[name])[:, None, None] for name in ("latents_mean", "latents_std"))
    with torch.no_grad():
        frames = vae.decode((spatial * std + mean)[:, :, None]).sample
    assert frames.shape == (3, 3, 1, 32, 32)
    expected = (frames[:, :, 0] / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(policy.decode(policy.noise(SEEDS)), expected, rtol=0, atol=1e-5)


def test_guidance_keeps_the_norm_of_each_tokens_conditional_velocity() -> None:
    conditional, unconditional = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    found = with_conditional_norm(conditional, unconditional, 4.0)
    torch.testing.assert_close(found.norm(dim=-1), conditional.norm(dim=-1))
    plain = unconditional + 4.0 * (conditional - unconditional)
    torch.testing.assert_close(torch.cosine_similarity(found, plain, dim=-1), torch.ones(2, 5))


def test_a_preview_decoder_is_refused(folder_of: Callable[[str], str]) -> None:
    with pytest.raises(UserError, match="model.preview_decoder=mine is invalid: .* Set model.preview_decoder=null"):
        load_nano("qwen_image", folder_of("qwen_image"), preview_decoder="mine")
