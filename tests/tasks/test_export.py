"""Loads the files of task=export with diffusers alone, reads its card, and uploads them to a hub in this process."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import write_checkpoint
from diffusers import FluxPipeline, FluxTransformer2DModel
from huggingface_hub import ModelCard, constants
from nano import MAX_WORDS, PROMPTS, prompts_of, save_nano
from policies.fake_hub import REPOSITORY, FakeHub, serving
from safetensors.torch import load_file
from torch import Tensor

from solrl_lightning.artifacts.hub import create_repository, upload
from solrl_lightning.build import build_model, load_trained
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.cli.hub import check_push
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.tasks.export import export, model_card, reward_of, weighted_names
from solrl_lightning.tasks.generate import without_training
from solrl_lightning.training.module import SolRLModule

STEPS = 3
SEEDS = torch.tensor([[11, 12]])


class Exported(NamedTuple):
    """A finished export, and the module whose weights it wrote."""

    folder: Path
    pipeline: str
    module: SolRLModule


def composed(folder: Path, *arguments: str) -> Run:
    with ConfigTree() as tree:
        return Run.of(application_config(tree.compose(arguments), folder))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_nano(tmp_path_factory.mktemp("pipeline"))


def exported(folder: Path, pipeline: str, dtype: str, *options: str, compiled: bool = True) -> Exported:
    # What is not needed is not looked at: neither the run's prompts nor a compiler.
    small = ("experiment=smoke", "trainer=cpu", f"model.pretrained='{pipeline}'", f"++model.dtypes.transformer={dtype}")
    small += options
    checkpoint = write_checkpoint(composed(folder, *small), folder / "last.ckpt")
    state = torch.load(checkpoint, weights_only=True)
    torch.save(state | {"precision_backend": "fp8 (emulated)"}, checkpoint)
    cfg = composed(
        folder, *small, "task=export", f"ckpt='{checkpoint}'", "data.train=nowhere.txt", f"family.compile={compiled}"
    )
    export(cfg)
    module = build_model(without_training(cfg), torch.device("cpu"))
    load_trained(module, checkpoint)
    return Exported(folder, pipeline, module)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory, pipeline: str) -> Exported:
    """An export in float32, where our images equal those of diffusers up to the last digits."""
    rewards = "reward=[shapes,shapes_strict]", "reward.shapes_strict.weight=0"
    summary = SUMMARY | {"config": {"model": "tiny"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("solrl_lightning.tasks.export.read_summary", lambda run: summary)
        return exported(tmp_path_factory.mktemp("export"), pipeline, "float32", *rewards)


def test_card_is_of_the_weights_though_the_run_trains_on(
    tmp_path: Path, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, later = SolRLModule.save_policy, tmp_path / "last.ckpt"

    def trained_on(self: SolRLModule, *args: Any) -> None:
        state = torch.load(later, weights_only=True)
        torch.save(state | {"global_step": 77}, later)
        save(self, *args)

    monkeypatch.setattr(SolRLModule, "save_policy", trained_on)
    exported(tmp_path, pipeline, "bfloat16")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| iterations | 0 |" in card and "77 iterations" not in card


def images_of(pipeline: FluxPipeline, module: SolRLModule) -> Tensor:
    """Images [2, 3, H, W] in [0, 1] of our seeds, sampled by diffusers alone."""
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        prompt=PROMPTS[0],
        num_images_per_prompt=2,
        latents=module.model.noise(SEEDS[0]),
        num_inference_steps=STEPS,
        guidance_scale=1.0,
        height=32,
        width=32,
        max_sequence_length=10,
        output_type="pt",
    )
    return images.images


def ours(module: SolRLModule, weights: str) -> Tensor:
    return module.sample(prompts_of(PROMPTS[:1]), SEEDS, weights=weights, steps=STEPS)[0]


@pytest.mark.parametrize("folder", ["transformer", "lora_ema", "lora_trained"])
def test_exported_weights_give_our_images_in_diffusers(exact: Exported, folder: str) -> None:
    loaded: dict[str, Any] = {}
    if folder == "transformer":
        loaded["transformer"] = FluxTransformer2DModel.from_pretrained(exact.folder / folder, dtype=torch.float32)
    plain = FluxPipeline.from_pretrained(exact.pipeline, **loaded)
    if folder != "transformer":
        plain.load_lora_weights(exact.folder / folder)
    images = images_of(plain, exact.module)
    weights = "default" if folder == "lora_trained" else "ema"
    torch.testing.assert_close(images, ours(exact.module, weights), rtol=0, atol=1e-4)
    assert (images - ours(exact.module, "base")).abs().max() > 0.1


@pytest.mark.parametrize("base_weights", ["bfloat16", "int8"])
def test_merged_folder_has_exactly_the_names_and_the_dtype_of_the_base(
    tmp_path: Path, pipeline: str, base_weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, compiled = f"base_weights={base_weights}", base_weights == "bfloat16"
    folder, _, module = exported(tmp_path, pipeline, "bfloat16", stored, compiled=compiled)
    assert re.search("README.md  # model card, without results; .*: has no summary.json", capsys.readouterr().out)
    card = (folder / "README.md").read_text()
    assert ("| base_weights | int8 |" in card) == (base_weights == "int8")
    assert "# LoRA for a local model\n" in card and "without which this card was written" in card  # of a file alone
    assert "reward `" not in card and "``," not in card and "objective" not in card
    merged = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    base = load_file(Path(pipeline) / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {x.dtype for x in base.values()} == {torch.bfloat16}
    assert {name: (x.shape, x.dtype) for name, x in merged.items()} == {
        name: (x.shape, x.dtype) for name, x in base.items()
    }
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed == {f"{name}.weight" for name in module.transformers.trained.lora_layers}
    config = json.loads((folder / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "FluxTransformer2DModel"


def test_usage_lines_of_the_card_run(exact: Exported) -> None:
    card = (exact.folder / "README.md").read_text()
    assert exact.pipeline not in card and "no evaluation before training" in card
    assert "# shapes LoRA for" in card and "shapes_strict" not in card  # its weight is 0
    assert "| precision | fp8 (emulated) |" in card and "| train | lora |" in card
    lora = exact.module.transformers.trained.config
    assert f"| lora_rank | {lora.r} |" in card and f"| lora_alpha | {lora.lora_alpha} |" in card
    named = card.replace("<this folder>", str(exact.folder)).replace("<folder of the base model>", exact.pipeline)
    blocks = re.findall("```python\n(.*?)```", named, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    assert names["image"].size == (32, 32)
    torch.testing.assert_close(images_of(names["pipe"], exact.module), ours(exact.module, "ema"), rtol=0, atol=1e-4)


def test_usage_lines_take_the_transformer_where_a_lora_is_fused(
    exact: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fused = exact.folder / "lora_ema" / "pytorch_lora_weights.safetensors"
    folder, _, module = exported(tmp_path, exact.pipeline, "float32", f"model.fused_lora='{fused}'")
    card = (folder / "README.md").read_text()
    assert str(fused.parent) not in card and f"other than the base's, with `{fused.name}`" in card
    assert "load_lora_weights" not in card + capsys.readouterr().out
    card = card.replace("<folder of the base model>", exact.pipeline).replace("<this folder>", str(folder))
    (block,) = re.findall("```python\n(.*?)```", card, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    torch.testing.assert_close(images_of(names["pipe"], module), ours(module, "ema"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("suffix", [".bf16.safetensors", ".safetensors"])
def test_usage_lines_of_sana_sample_as_the_evaluations(tmp_path: Path, suffix: str) -> None:
    """With its default variant, whose files a pipeline without it does not find, and in a folder without it."""
    folder = save_nano(tmp_path / "pipeline", architecture="sana")
    for file in Path(folder).glob("*/*.safetensors"):
        file.rename(file.with_suffix(suffix))
    options = (
        "model=sana",
        "model.resolution=32",
        "model.embeddings=null",
        "model.dtypes.default=float32",
    )
    made = exported(tmp_path, folder, "float32", *options, f"model.max_sequence_length={MAX_WORDS}")
    card = (made.folder / "README.md").read_text()
    blocks = re.findall("```python\n(.*?)```", card.replace("<folder of the base model>", folder), flags=re.DOTALL)
    code = (
        "\n".join(blocks)
        .replace("<this folder>", str(made.folder))
        .replace('prompt="a prompt"', f"prompt={PROMPTS[0]!r}, latents=latents, output_type='pt'")
    )
    names: dict[str, Any] = {"latents": made.module.model.noise(SEEDS[0, :1])}
    exec(code, names)
    expected = made.module.sample(prompts_of(PROMPTS[:1]), SEEDS[:, :1], weights="ema", steps=4)[0]
    torch.testing.assert_close(names["image"][None], expected, rtol=0, atol=1e-3)


SUMMARY: dict[str, Any] = {
    "reward": "pickscore",
    "other_rewards": {"hpsv2": {"weight": 0.0}},
    "held_out": {"prompts": 64, "images_per_prompt": 2, "steps": 28},
    "versions": {"torch": "2.15.0"},
    "machine": {"device": "NVIDIA H100"},
    "evaluations": [
        {"iteration": 0, "pickscore": 20.0, "hpsv2": 0.3, "standard_error": {"pickscore": 0.1}},
        {"iteration": 40, "pickscore": 22.0, "hpsv2": 0.29, "change_error": {"pickscore": 0.05}},
        {"iteration": 60, "pickscore": 25.0, "hpsv2": 0.2},
    ],
}


def card_of(
    base: str,
    altered: Sequence[str] = (),
    scheduler: dict[str, Any] | None = None,
    iterations: int = 40,
    edits: bool = False,
    averaged: bool = True,
    solver: str = "dpm2",
    scheduler_class: str = "FlowMatchEulerDiscreteScheduler",
    **call: int,
) -> str:
    return model_card(
        base,
        {"num_inference_steps": 28} | call,
        altered,
        iterations,
        SUMMARY,
        with_lora=True,
        averaged=averaged,
        pipeline="FluxPipeline",
        transformer="FluxTransformer2DModel",
        dtype="bfloat16",
        variant=None,
        edits=edits,
        scheduler=scheduler,
        scheduler_class=scheduler_class,
        scheduler_shift=None,
        custom=None,
        began_as="style.safetensors",
        settings={"model": "flux1", "reward": "pickscore", "family": "a|b", "objective": "nft", "solver": solver},
        picture="images/base_and_trained.png",
        name="me/flux-pickscore",
    )


def test_card_has_the_results_of_its_checkpoint_and_the_base_with_its_licence() -> None:
    text = card_of("black-forest-labs/FLUX.1-dev")
    data = ModelCard(text).data
    assert data.base_model == "black-forest-labs/FLUX.1-dev" and data.license == "other"
    assert data.license_name == "flux.1-dev-non-commercial-license" and data.pipeline_tag == "text-to-image"
    assert "| pickscore | 20.00 ± 0.10 | 22.00 | +2.000 ± 0.050 |" in text
    assert "| hpsv2, not trained on | 0.3000 | 0.2900 | -0.0100 |" in text and "25.00" not in text
    assert 'pipe.load_lora_weights("me/flux-pickscore", subfolder="lora_ema"' in text
    assert "iterations: 40 on NVIDIA H100" in text and "images/base_and_trained.png" in text
    assert "custom class" not in text and "a&#124;b" in text
    assert "this code takes Euler steps at the same noise levels" in text
    assert "began as the LoRA `style.safetensors`, so its licence applies" in text


def test_rewards_of_a_card_have_their_weights_and_what_combines_them() -> None:
    weights = {"a": 1.0, "b": -0.5, "watched": 0.0, "c": 2.0}
    assert weighted_names(weights, "sum") == "a - 0.5 b + 2 c"
    assert weighted_names({"a": -1.0}, "gdpo") == "gdpo of -1 a"


def test_reward_of_a_run_is_the_recorded_one(tmp_path: Path) -> None:
    assert reward_of(tmp_path) == ""
    (tmp_path / ".hydra").mkdir()
    record = "reward: {pretrained: null, combine: gdpo, a: {_target_: x, weight: 1.0}, b: {_target_: x, weight: -0.5}}"
    (tmp_path / ".hydra" / "config.yaml").write_text(record)
    assert reward_of(tmp_path) == "gdpo of a - 0.5 b"


def test_card_of_an_open_and_of_an_unknown_base() -> None:
    text = card_of("Qwen/Qwen-Image")
    assert ModelCard(text).data.license == "apache-2.0" and "Qwen/Qwen-Image is under the Apache-2.0" in text
    text = card_of("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", num_frames=33)
    assert ModelCard(text).data.pipeline_tag == "text-to-video"
    assert 'video = pipe(prompt="a prompt", num_inference_steps=28, num_frames=33).frames[0]' in text
    for solver, sampled in (("dpm2", "with DPM-Solver++ of second order"), ("euler", "in Euler steps")):
        text = card_of("someone/other", solver=solver, scheduler_class="UniPCMultistepScheduler")
        assert f"are sampled {sampled}; this code samples with `UniPCMultistepScheduler` at the same noise" in text
    text = card_of("Qwen/Qwen-Image", ["a/b/c.safetensors", "d.pth"], scheduler={"shift_terminal": None})
    assert "with `a/b/c.safetensors` and `d.pth`, and so give other images" in text and "load_lora" not in text
    assert "from_config(pipe.scheduler.config, shift_terminal=None)" in text
    text = card_of("Qwen/Qwen-Image-Edit", edits=True)
    assert ModelCard(text).data.pipeline_tag == "image-to-image" and "from diffusers.utils import load_image\n" in text
    assert 'pipe(image=load_image("<square image>"), prompt="an instruction", num_inference_steps=28).images[0]' in text
    assert "`lora_ema` is the average of the trained adapter" in text
    text = card_of("Qwen/Qwen-Image", averaged=False, solver="euler")
    assert "`lora_ema` and `lora_trained` are the same" in text and "Euler steps" not in text
    text = card_of("someone/other", iterations=41)
    assert ModelCard(text).data.license is None
    assert "no evaluation before training that compares with one after 41 iterations" in text and "22.0000" not in text


def test_upload_sends_the_weights_and_the_card_only(
    exact: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    (exact.folder / "solrl_lightning.log").write_text("not for others")
    with serving(FakeHub(tmp_path), tmp_path / "cache", monkeypatch) as hub:
        create_repository(REPOSITORY)
        upload(REPOSITORY, exact.folder, ["lora_ema", "lora_trained", "transformer", "images", "README.md"])
        (request,) = hub.created
        assert request.get("visibility") == "private" or request["private"] is True  # by version of huggingface_hub
        weights = "lora_ema/pytorch_lora_weights.safetensors"
        assert hub.uploaded[weights] == (exact.folder / weights).read_bytes()
        names = {name.partition("/")[0] for name in hub.uploaded}
        assert names == {"lora_ema", "lora_trained", "transformer", "README.md"}
        hub.refusal = 403, "Forbidden"
        with pytest.raises(UserError, match=f"task.push={REPOSITORY} failed: 403 .*hf auth whoami.* the same command"):
            create_repository(REPOSITORY)
        hub.refusal = 413, "the quota of storage is used up"
        with pytest.raises(UserError, match="failed: .*413 .*quota of storage is used up[.] /.* is whole[.]") as error:
            upload(REPOSITORY, exact.folder, ["README.md"])
        command = f"hf upload {REPOSITORY} {exact.folder} . --include README.md --include 'README.md/*'"
        assert str(error.value).endswith(f" Then run {command}.") and "log in" not in str(error.value).lower()


def test_upload_without_a_token_or_offline_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    check_push("me/lora")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="an upload needs a token, .* Log in with `hf auth login`"):
        check_push("me/lora")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE must not be set. .* unset HF_HUB_OFFLINE"):
        check_push("me/lora")
