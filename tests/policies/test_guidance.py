"""Classifier-free guidance: the formula, the images of diffusers' pipelines, and what a run with it counts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from nano import PROMPTS, LevelsOf, load_nano, model_class, prompts_of
from torch import Tensor, nn

from solrl_lightning.cli.checks import check_machine
from solrl_lightning.errors import UserError
from solrl_lightning.objectives.nft import NFT
from solrl_lightning.options.run import Run
from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.guidance import guide
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.rollout.chunks import BatchSize, iter_sampled_chunks
from solrl_lightning.rollout.records import EncodedPrompts
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.tasks.plan import plan
from solrl_lightning.tasks.train import train

SEEDS = torch.tensor([3, 4, 5])
STEPS, SCALE = 3, 4.5


def times_embedding(transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
    return transformer(x) * conditioning["embeds"] + sigma


def test_velocity_is_extrapolated_from_the_unconditional_one() -> None:
    x, embeds, negative = torch.randn(4, 6), torch.randn(4, 6), torch.randn(1, 6)
    call = (nn.Identity(), x, torch.tensor(0.3), {"embeds": embeds})
    for scale in (0.0, 0.5, 1.0, 7.5):
        expected = x * (negative + scale * (embeds - negative)) + 0.3
        velocity = guide(times_embedding, {"embeds": negative}, scale)(*call)
        torch.testing.assert_close(velocity, expected, rtol=0, atol=1e-5)
    assert guide(times_embedding, {"embeds": negative}, 1.0) is times_embedding  # one forward pass


def test_unconditional_velocity_has_no_gradient() -> None:
    layer, x, embeds = nn.Linear(6, 6), torch.randn(4, 6), torch.randn(4, 6)
    gradients = []
    for scale in (1.0, SCALE):
        velocity = guide(times_embedding, {"embeds": torch.randn(1, 6)}, scale)
        loss = velocity(layer, x, torch.tensor(0.3), {"embeds": embeds}).sum()
        gradients.append(torch.autograd.grad(loss, layer.weight)[0])
    torch.testing.assert_close(gradients[1], SCALE * gradients[0])


@pytest.mark.parametrize("architecture", ["sd3", "sana", "flux2", "qwen_image", "z_image", "wan"])
def test_guided_images_match_the_diffusers_pipeline(folder_of: Callable[[str], str], architecture: str) -> None:
    model = load_nano(architecture, folder_of(architecture), dtypes={"default": "float32"}, guidance_scale=SCALE)
    theirs = model.pipeline_class.from_pretrained(folder_of(architecture), dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    options: dict[str, object] = dict(height=32, width=32, num_inference_steps=STEPS) | model.call_options
    if architecture == "sana":
        theirs.scheduler = FlowMatchEulerDiscreteScheduler()
        options |= dict(use_resolution_binning=False)
        options |= dict(sigmas=model.sigmas(STEPS)[:-1].tolist())
    if architecture == "wan":
        theirs.scheduler = LevelsOf(model)
        options |= dict(num_frames=5)

    def paint(kind: str) -> Tensor:
        """One by one, as the architecture card does."""
        noise = model.noise(SEEDS)
        parts = [
            theirs(prompt=prompt, latents=x, output_type=kind, **options)[0]
            for prompt, x in zip(PROMPTS, noise.split(1), strict=True)
        ]
        return torch.cat(parts)

    stage, prompts = (
        Stage(sampler="merged", steps=STEPS, solver="euler"),
        EncodedPrompts(prompts_of(PROMPTS), model.encode(prompts_of(PROMPTS))),
    )
    batch = BatchSize(2, pad_to_size=False)
    chunks = list(iter_sampled_chunks(model, model.transformer, batch, stage, prompts, SEEDS[:, None]))
    latents = torch.cat([chunk.state.x for chunk in chunks])
    painted = model.unscale_latents(latents, model.pipeline.vae) if architecture == "flux2" else latents
    torch.testing.assert_close(painted, paint("latent"), rtol=0, atol=1e-4)
    torch.testing.assert_close(model.decode(latents), paint("pt"), rtol=0, atol=1e-4)
    model.guidance_scale = 1.0
    (chunk, _) = iter_sampled_chunks(model, model.transformer, batch, stage, prompts, SEEDS[:, None])
    assert (chunk.state.x - latents[:2]).abs().max() > 0.01


def test_a_distilled_model_is_not_guided(folder_of: Callable[[str], str], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("flux2"), tmp_path / "distilled")
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": True}))
    load_nano("flux2", str(folder))
    with pytest.raises(UserError, match="model.guidance_scale=3.0 is invalid: .* is distilled, .* Set model.guidance"):
        load_nano("flux2", str(folder), guidance_scale=3.0)


def test_a_model_without_the_embedding_takes_no_guidance(folder_of: Callable[[str], str]) -> None:
    with pytest.raises(UserError, match="model.guidance=3.5 is invalid: .* embedding, .* Set model.guidance=1"):
        load_nano("flux1", folder_of("flux1"), guidance=3.5)


def test_empty_prompt_is_encoded_once_and_cached(
    folder_of: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, texts = model_class("sd3").encode_uncached, []

    def recorded(self: PipelineAdapter, prompts: list[str], device: torch.device) -> Any:
        texts.append(prompts)
        return encode(self, prompts, device)

    monkeypatch.setattr(model_class("sd3"), "encode_uncached", recorded)
    for times in (1, 2):
        model = load_nano("sd3", folder_of("sd3"), embeddings=str(tmp_path), guidance_scale=SCALE)
        assert texts == [[""]] and (model.pipeline.text_encoder is None) == (times == 2)
        assert model.unconditional["prompt_embeds"].dtype == torch.bfloat16
    assert not load_nano("sd3", folder_of("sd3")).unconditional and texts == [[""]]


class GuidedNFT(NFT):
    """An objective that accepts guidance; what its loss means does not matter here."""

    guided_training = True


SMALL = (
    "model=sd3 model.resolution=32 model.max_sequence_length=10 model.embeddings=null model.full_steps=3 "
    "model.preview_steps=2 data=shapes data.eval_prompts=1 experiment=smoke trainer=cpu ~logger iterations=1 "
    "family.pool=4 family.keep=2 family.compile=false prompts_per_iteration=2 callbacks.sample_grid.every=0 "
    "model.gradient_checkpointing=false "
    f"callbacks.rank_correlation.probe_every=0 +trainer.limit_val_batches=0 model.guidance_scale={SCALE} "
    f"objective._target_={__name__}.GuidedNFT"
).split()


def test_guided_run_counts_twice_the_evaluations(
    compose: Callable[..., Run], folder_of: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sd3, rows = model_class("sd3"), {"conditional": 0, "unconditional": 0}
    velocity = sd3.velocity

    def counted(
        self: PipelineAdapter, transformer: nn.Module, x: Tensor, sigma: Tensor, prompts: Conditioning
    ) -> Tensor:
        if x.is_meta:  # tried before the weights are read
            return velocity(self, transformer, x, sigma, prompts)
        empty = torch.equal(prompts["pooled"], self.unconditional["pooled"].expand_as(prompts["pooled"]))
        rows["unconditional" if empty else "conditional"] += len(x)
        return velocity(self, transformer, x, sigma, prompts)

    monkeypatch.setattr(sd3, "velocity", counted)
    train(compose(*SMALL, f"model.pretrained={folder_of('sd3')}"))
    # 2 prompts: 4 candidates x 2 steps, 2 kept x 3 steps; 2 rows of the policy, the old policy and the reference
    assert rows == {"conditional": 2 * (8 + 6 + 6), "unconditional": 2 * (8 + 6 + 6)}
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"
    state = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]
    assert state["evaluations"] == 2 * 40


@pytest.mark.parametrize("objective", ["nft", "awm"])
def test_training_with_guidance_needs_an_objective_of_the_guided_velocity(
    compose: Callable[..., Run], objective: str
) -> None:
    guided = ("model=sd3", "model.guidance_scale=4.5", f"objective={objective}")
    for task, check in (("train", check_machine), ("plan", plan)):
        with pytest.raises(UserError, match=f"scale=4.5 is invalid: the loss of objective={objective.upper()} takes"):
            check(compose(*guided, f"task={task}"))
    check_machine(compose(*guided, "task=evaluate"))
