"""The embedded model is the one that the recipe builds, and it has learned something but not everything."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from nano import load_model, prompts_of
from pretrain import build_pipeline
from torch import Tensor

from solrl_lightning.metrics.rank import rank_fidelity
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.chunks import BatchSize, iter_sampled_chunks, score_chunks, score_images
from solrl_lightning.rollout.records import Candidates, EncodedPrompts
from solrl_lightning.rollout.scoring_worker import inline_worker
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.seeds import evaluation_seeds
from solrl_lightning.shapes.world import eval_captions

HELD_OUT = eval_captions()[:8]
EACH = 12  # images of a prompt, of which a reward makes an order


@pytest.fixture(scope="module")
def tiny() -> Flux1:
    return load_model("tiny", decode_batch=16, preview_decoder="tiny")


def scored(model: Flux1, captions: list[str]) -> Candidates:
    """Two images of each held-out prompt, painted from ``captions``."""
    seeds = evaluation_seeds(0, HELD_OUT, 2)
    prompts = EncodedPrompts(prompts_of(HELD_OUT), model.encode(prompts_of(captions)))
    stage = Stage(sampler="merged", steps=6, solver="euler")
    rewards = WeightedRewards({"shapes": ShapesReward()}, {"shapes": 1.0})
    chunks = iter_sampled_chunks(model, model.transformer, BatchSize(16, False), stage, prompts, seeds)
    score = partial(score_images, model.decode)
    return score_chunks(chunks, prompts, seeds, rewards, score, lambda done, total: None, inline_worker)


def test_embedded_model_has_the_architecture_of_the_recipe(tiny: Flux1) -> None:
    built = build_pipeline(0)
    for component in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        shapes, expected = (
            {name: value.shape for name, value in getattr(pipeline, component).state_dict().items()}
            for pipeline in (tiny.pipeline, built)
        )
        assert shapes == expected
    assert len(tiny.pipeline.tokenizer) == len(built.tokenizer)
    assert tiny.pipeline.tokenizer_2.get_vocab() == built.tokenizer_2.get_vocab()


def test_images_follow_their_captions_and_leave_room_to_improve(tiny: Flux1) -> None:
    right = scored(tiny, HELD_OUT).rewards.mean()
    wrong = scored(tiny, HELD_OUT[::-1]).rewards.mean()
    assert 0.2 < right < 0.75
    assert wrong < 0.5 * right


def test_model_knows_shapes_and_sides_and_does_not_always_paint_them(tiny: Flux1) -> None:
    seeds, stage = evaluation_seeds(1, HELD_OUT, 12), Stage(sampler="merged", steps=10, solver="euler")
    encoded = EncodedPrompts(prompts_of(HELD_OUT), tiny.encode(prompts_of(HELD_OUT)))
    chunks = iter_sampled_chunks(tiny, tiny.transformer, BatchSize(96, False), stage, encoded, seeds)
    images = torch.cat([tiny.decode(chunk.state.x) for chunk in chunks if chunk.state is not None])
    reward = ShapesReward()
    means = reward.parts(images, [caption for caption in HELD_OUT for _ in range(12)]).mean(0).tolist()
    parts = dict(zip(reward.part_names, means, strict=True))
    assert 0.4 < parts["right_side"] < 0.75 and 0.55 < parts["right_shape"] < 0.85
    assert 0.1 < parts["all_right"] < 0.35


def decode_changed(tiny: Flux1, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Any]) -> None:
    decode_latents, x = tiny.decode_latents, tiny.noise(torch.arange(4))
    monkeypatch.setattr(tiny, "_has_decoded", False)
    monkeypatch.setattr(tiny, "decode_latents", lambda x, vae: change(decode_latents(x, vae)))
    for _ in range(2):
        tiny.decode(x)


@pytest.mark.parametrize(("scale", "offset", "lines"), [(1, 0, 0), (4, -1, 1), (127.5, 127.5, 1)])
def test_decoded_images_of_another_range_are_named_once(
    tiny: Flux1,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    scale: float,
    offset: float,
    lines: int,
) -> None:
    decode_changed(tiny, monkeypatch, lambda images: scale * images + offset)
    assert len(re.findall(r"the decoded images of Flux1 span .* and are clamped to \[-1, 1\]", caplog.text)) == lines


def test_preview_decoder_is_close_to_the_autoencoder_and_ranks_alike(tiny: Flux1) -> None:
    captions = [caption for caption in HELD_OUT for _ in range(EACH)]
    encoded = EncodedPrompts(prompts_of(HELD_OUT), tiny.encode(prompts_of(HELD_OUT)))
    seeds, stage = evaluation_seeds(0, HELD_OUT, EACH), Stage(sampler="merged", steps=6, solver="euler")
    chunks = iter_sampled_chunks(tiny, tiny.transformer, BatchSize(48, False), stage, encoded, seeds)
    x = torch.cat([chunk.state.x for chunk in chunks])
    images, previews = tiny.decode(x), tiny.preview(x)
    assert (previews - images).abs().mean() < 0.02
    reward = ShapesReward()
    true, proxy = (reward(pictures, captions).unflatten(0, (-1, EACH)) for pictures in (images, previews))
    assert rank_fidelity(proxy, true, k=4)[:, 0].mean() > 0.9  # Spearman
