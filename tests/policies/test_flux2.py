"""What is FLUX.2's own: a shift by tokens and steps, statistics of the latents. See test_pipelines.py for the rest."""

import math
from collections.abc import Callable

import pytest
import torch
from nano import PROMPTS, load_nano
from torch import Tensor

from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.seeds import noise
from tests.sigmas import shifted_sigmas

SEEDS = torch.tensor([3, 4, 5])


@pytest.fixture(scope="module")
def policy(folder_of: Callable[[str], str]) -> PipelineAdapter:
    return load_nano("flux2", folder_of("flux2"))


def test_sigmas_are_shifted_by_image_tokens_and_steps(policy: PipelineAdapter) -> None:
    before = policy.pipeline.scheduler.sigmas.clone()
    for steps in (1, 10, 50):  # mu is linear in the steps, and at 10 and 200 steps in the tokens, of which there are 16
        at_10, at_200 = 8.73809524e-05 * 16 + 1.89833333, 0.00016927 * 16 + 0.45666666
        mu = at_10 + (at_200 - at_10) / 190 * (steps - 10)
        expected = shifted_sigmas(steps, math.exp(mu))
        torch.testing.assert_close(policy.sigmas(steps), expected, rtol=0, atol=1e-6)
    assert torch.equal(policy.pipeline.scheduler.sigmas, before)


def test_embeddings_are_three_layers_of_qwen_side_by_side(policy: PipelineAdapter) -> None:
    found, tokenizer = policy.encode(PROMPTS)["prompt_embeds"], policy.pipeline.tokenizer
    text = f"<|im_start|>user\n{PROMPTS[0]}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, truncation=True, max_length=10, return_tensors="pt").input_ids
    with torch.no_grad():
        layers = policy.pipeline.text_encoder(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([layers[number][0] for number in (9, 18, 27)], dim=-1)
    assert found.shape == (3, 10, 96)
    torch.testing.assert_close(found[0].float(), expected, rtol=2**-7, atol=2**-7)


def test_decode_takes_the_patches_apart_and_applies_the_statistics(policy: PipelineAdapter) -> None:
    latents, vae = policy.noise(SEEDS), policy.pipeline.vae
    assert policy.latent_shape == (32, 4, 4) and torch.equal(latents, noise(SEEDS, (32, 4, 4)))
    mean, std = vae.bn.running_mean[:, None, None], (vae.bn.running_var + 1e-4).sqrt()[:, None, None]
    with torch.no_grad():
        decoded = vae.decode(unpatched(latents * std + mean)).sample
    torch.testing.assert_close(policy.decode(latents), ((decoded + 1) / 2).clamp(0, 1), rtol=0, atol=1e-5)


def unpatched(latents: Tensor) -> Tensor:
    """[B, 4 C, H, W] -> [B, C, 2 H, 2 W]: of a channel's four, rows before columns."""
    batch, channels, height, width = latents.shape
    patches = latents.reshape(batch, channels // 4, 2, 2, height, width)
    return torch.einsum("bcijyx->bcyixj", patches).reshape(batch, channels // 4, 2 * height, 2 * width)
