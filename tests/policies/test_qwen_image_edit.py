"""Qwen-Image-Edit: a prompt has an input image, and what diffusers' pipeline paints is what the model samples."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from nano import ATTENTION, load_nano, lora_config, model_class, model_options, prompts_of, random_state
from PIL import Image
from torch import Tensor

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.data.prompts import PromptSets, read_prompt_sets
from solrl_lightning.names import TRAINED
from solrl_lightning.options.run import Run
from solrl_lightning.policies import lora
from solrl_lightning.policies.architectures import find_architecture
from solrl_lightning.policies.qwen_image_edit import QwenImageEdit
from solrl_lightning.sampling import integrate

TEXTS = ["a red circle above a blue square", "a circle", "a green triangle left of a cyan circle"]
SEEDS, STEPS, LENGTH = torch.tensor([3, 4, 2**32 - 1]), 4, 15  # tokens of the longest text with its template
FLOAT32 = {"default": "float32"}
MODELS = [("Qwen-Image", "qwen_image"), ("Qwen-Image-Edit", "qwen_image_edit")]
NAMES = ["square.png", "same.png", "wide.png"]


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> PromptSets:
    """Three prompts with images of their own, one of them wider than high."""
    folder = tmp_path_factory.mktemp("edits")
    (folder / "images").mkdir()
    generator = np.random.default_rng(0)
    for name, size in zip(NAMES, [(48, 48), (32, 32), (40, 64)], strict=True):
        pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((size[1], size[0])).save(folder / "images" / name)
    rows = [{"prompt": text, "image": name} for text, name in zip(TEXTS, NAMES, strict=True)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read_prompt_sets(folder / "train.jsonl", None, with_images=True)


def square(edits: PromptSets, row: int) -> Image.Image:
    """The middle of an input image."""
    with Image.open(str(edits.train[row].input_image)) as image:
        return image.crop((12, 0, 52, 40) if row == 2 else (0, 0, *image.size))


@pytest.fixture
def theirs(folder_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> QwenImageEditPipeline:
    """The pipeline as diffusers loads it, for images of 32^2 instead of 1024^2 pixels."""
    dimensions = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(
        pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: dimensions(area // 1024, ratio)
    )
    pipeline = QwenImageEditPipeline.from_pretrained(folder_of("qwen_image_edit"), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load(folder: str, **options: Any) -> QwenImageEdit:
    model = load_nano("qwen_image_edit", folder, **{"dtypes": FLOAT32, "max_sequence_length": LENGTH} | options)
    assert isinstance(model, QwenImageEdit)
    return model


def sample(model: QwenImageEdit, prompts: list[Prompt], seeds: Tensor = SEEDS) -> Tensor:
    conditioning = model.encode(prompts)
    with torch.no_grad():
        return integrate(
            lambda x, sigma: model.guided_velocity(model.transformer, x, sigma, conditioning),
            model.noise(seeds),
            model.sigmas(STEPS),
        )


def paint(model: QwenImageEdit, pipeline: QwenImageEditPipeline, edits: PromptSets, row: int, **options: Any) -> Tensor:
    """What the pipeline makes of one prompt, whose image it resizes and whose embedding it does not pad."""
    options = dict(true_cfg_scale=1.0, output_type="latent") | options
    options |= dict(num_inference_steps=STEPS, height=32, width=32, latents=model.noise(SEEDS[row : row + 1]))
    images: Tensor = pipeline(square(edits, row), TEXTS[row], **options).images
    return images


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_images_match_the_diffusers_pipeline(
    folder_of: Callable[[str], str], edits: PromptSets, theirs: QwenImageEditPipeline, scale: float
) -> None:
    model = load(folder_of("qwen_image_edit"), guidance_scale=scale)
    together = sample(model, edits.train)
    options: dict[str, Any] = dict(true_cfg_scale=scale, negative_prompt="") if scale > 1 else {}
    for row, (prompt, text) in enumerate(zip(edits.train, TEXTS, strict=True)):
        latents = paint(model, theirs, edits, row, **options)
        model.max_sequence_length = len(text.split()) + 7  # no padding, but of the empty text
        alone = sample(model, [prompt], SEEDS[row : row + 1])
        if scale == 1:
            assert torch.equal(alone, latents)
        torch.testing.assert_close(alone, latents, rtol=0, atol=1e-5)
        torch.testing.assert_close(together[row : row + 1], latents, rtol=0, atol=1e-5)
        expected = paint(model, theirs, edits, row, output_type="pt", **options)
        torch.testing.assert_close(model.decode(alone), expected, rtol=0, atol=1e-5)
    images = [prompt.metadata for prompt in edits.train[::-1]]
    swapped = [replace(prompt, metadata=metadata) for prompt, metadata in zip(edits.train, images, strict=True)]
    assert (sample(model, swapped) - together)[0].abs().max() > 1e-3  # another image


def test_saved_lora_paints_the_same_in_diffusers(
    folder_of: Callable[[str], str], edits: PromptSets, theirs: QwenImageEditPipeline, tmp_path: Path
) -> None:
    model = load(folder_of("qwen_image_edit"), max_sequence_length=len(TEXTS[0].split()) + 7)
    layers = lora.add_adapters(model.transformer, lora_config(rank=4, alpha=12, targets=ATTENTION), seed=0)
    state = random_state(lora.adapter_state(layers, TRAINED), seed=6)
    without = sample(model, edits.train[:1], SEEDS[:1])
    lora.load_state(layers, TRAINED, state)
    model.save_lora(tmp_path, state, lora_config(rank=4, alpha=12, targets=ATTENTION))
    theirs.load_lora_weights(tmp_path)
    latents = sample(model, edits.train[:1], SEEDS[:1])
    torch.testing.assert_close(latents, paint(model, theirs, edits, 0), rtol=0, atol=1e-4)
    assert (latents - without).abs().max() > 0.02


def test_embeddings_are_cached_by_text_and_content_of_the_image(
    folder_of: Callable[[str], str], edits: PromptSets, tmp_path: Path
) -> None:
    folder, prompts, options = folder_of("qwen_image_edit"), edits.train, dict(embeddings=str(tmp_path))
    expected = load(folder, guidance_scale=4.0).encode(prompts)
    embeds = expected["prompt_embeds"]
    assert embeds.shape == (3, 4 + LENGTH, 64) and expected["prompt_embeds_mask"].sum(1).tolist() == [18, 13, 19]
    assert expected["negative_prompt_embeds_mask"].sum(1).tolist() == [4 + 7] * 3
    assert expected["image_latents"].shape == (3, 16, 64)
    first = load(folder, guidance_scale=4.0, **options)
    assert all(torch.equal(value, expected[name]) for name, value in first.encode(prompts).items())
    again = load(folder, guidance_scale=4.0, **options)
    for name, value in again.encode(prompts).items():
        assert torch.equal(value, expected[name]), name
    assert again.pipeline.text_encoder is None  # nothing was embedded
    # The same words with another image are another prompt.
    changed = again.encode([replace(prompts[2], text=prompts[0].text)])
    assert (changed["prompt_embeds"] - embeds[:1]).abs().max() > 0.01
    assert len(list(tmp_path.iterdir())) == 4
    plain = load(folder, **options).encode(prompts)  # without guidance: other files
    assert set(plain) == {"prompt_embeds", "prompt_embeds_mask", "image_latents"}


def test_random_weights_need_no_image(folder_of: Callable[[str], str]) -> None:
    for scale, names in ((1.0, 3), (4.0, 5)):
        model = load_nano("qwen_image_edit", folder_of("qwen_image_edit"), weights="random", guidance_scale=scale)
        conditioning = model.encode(prompts_of(TEXTS))
        assert len(conditioning) == names and conditioning["prompt_embeds"].shape == (3, 4 + 10, 64)
        with torch.no_grad():
            velocity = model.guided_velocity(model.transformer, model.noise(SEEDS), torch.tensor(0.5), conditioning)
        assert velocity.shape == (3, 16, 64)


def test_it_is_qwen_image_with_an_image(compose: Callable[..., Run]) -> None:
    image, edit = (compose(f"model={name}").model.model_dump() for name in ("qwen_image", "qwen_image_edit"))
    assert {key for key in edit if edit[key] != image[key]} == {"pretrained", "input_image", "data", "policy"}
    assert edit["policy"].keys() == image["policy"].keys()
    parts = [find_architecture(f"Qwen/{name}", model_class(model).pipeline_class).components for name, model in MODELS]
    assert parts[0] == parts[1]
    model = QwenImageEdit(**model_options("qwen_image_edit") | {"weights": "random", "device": "meta"})
    assert model.prompt_length == 18**2 + 128 and model.latent_shape == (32 * 32, 64)
