"""Distilled models: few steps at the noise levels of their cards, and a LoRA that is part of the base model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from nano import MAX_WORDS, PROMPTS, WIDTH, load_nano, prompts_of, relative_error
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor

from solrl_lightning.options.run import Run
from solrl_lightning.policies.architectures import read_architecture
from solrl_lightning.policies.config_files import ARCHITECTURES
from solrl_lightning.sampling import integrate
from solrl_lightning.tasks.train import train

FolderOf = Callable[[str], str]
MODELS = {"flux2_klein": "flux2", "z_image_turbo": "z_image", "qwen_image_lightning": "qwen_image"}
FLOAT32 = {"default": "float32"}
LAYERS = [f"transformer_blocks.0.attn.{name}" for name in ("to_q", "add_k_proj")]
ALPHA, RANK = 8.0, 4
SEEDS = torch.tensor([3, 4, 5])
LIGHTNING: Any = OmegaConf.load(Path(__file__).parents[2] / "conf" / "model" / "qwen_image_lightning.yaml")


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """A LoRA of Qwen-Image with the names of Qwen-Image-Lightning's files."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for layer in LAYERS:
        for name, shape in {"lora_down": (RANK, WIDTH), "lora_up": (WIDTH, RANK)}.items():
            state[f"{layer}.{name}.weight"] = 0.2 * torch.randn(shape, generator=generator)
        state[f"{layer}.alpha"] = torch.tensor(ALPHA)
    return state


@pytest.fixture(scope="module")
def lora(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("lightning") / "4steps.safetensors"
    save_file(tensors, file)
    return file


def test_a_fused_lora_is_part_of_the_weights(folder_of: FolderOf, lora: Path, tensors: dict[str, Tensor]) -> None:
    folder = folder_of("qwen_image")
    base = load_nano("qwen_image", folder, dtypes=FLOAT32).transformer.state_dict()
    fused = load_nano("qwen_image", folder, dtypes=FLOAT32, fused_lora=str(lora)).transformer.state_dict()
    assert base.keys() == fused.keys()
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        update = torch.zeros_like(weight)
        if layer in LAYERS:
            update = ALPHA / RANK * tensors[f"{layer}.lora_up.weight"] @ tensors[f"{layer}.lora_down.weight"]
            assert update.norm() > 0.1
        torch.testing.assert_close(fused[name], weight + update, rtol=0, atol=1e-6)


def test_lightning_paints_as_its_pipeline(folder_of: FolderOf, lora: Path) -> None:
    """diffusers keeps the LoRA beside the weights, and has the scheduler of the model card."""
    folder, steps = folder_of("qwen_image"), LIGHTNING.full_steps
    levels = OmegaConf.to_container(LIGHTNING.scheduler)
    model = load_nano("qwen_image", folder, dtypes=FLOAT32, fused_lora=str(lora), scheduler=levels)
    torch.testing.assert_close(model.sigmas(steps), torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]))
    conditioning = model.encode(prompts_of(PROMPTS))
    with torch.no_grad():
        latents = integrate(
            lambda x, sigma: model.velocity(model.transformer, x, sigma, conditioning),
            model.noise(SEEDS),
            model.sigmas(steps),
            LIGHTNING.solver,
        )
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config, **levels)
    options: dict[str, Any] = dict(height=32, width=32, true_cfg_scale=1.0, max_sequence_length=MAX_WORDS)
    options |= dict(num_inference_steps=steps, output_type="latent")

    def paint() -> Tensor:
        return pipeline(prompt=list(PROMPTS), latents=model.noise(SEEDS), **options)[0]

    assert relative_error(latents, paint()) > 1e-3  # without the LoRA
    pipeline.load_lora_weights(lora)
    torch.testing.assert_close(latents, paint(), rtol=0, atol=1e-5)


def test_levels_of_z_image_turbo_have_the_shift_of_its_config_file(folder_of: FolderOf) -> None:
    scheduler = read_architecture(ARCHITECTURES / "Tongyi-MAI" / "Z-Image-Turbo").components["scheduler"].config
    model = load_nano("z_image", folder_of("z_image"), scheduler={"shift": scheduler["shift"]})
    uniform = torch.linspace(1, 0, 9)
    torch.testing.assert_close(model.sigmas(8), 3 * uniform / (1 + 2 * uniform))


@pytest.mark.parametrize(
    ("model", "family"), [("flux2_klein", "race"), ("z_image_turbo", "prefix"), ("qwen_image_lightning", "sol_rl")]
)
def test_a_distilled_model_trains_with_its_steps(
    compose: Callable[..., Run], folder_of: FolderOf, lora: Path, tmp_path: Path, model: str, family: str
) -> None:
    job = [f"model={model}", f"model.pretrained={folder_of(MODELS[model])}", f"family={family}", "family.pool=6"]
    job += [f"model.fused_lora={lora}"] if model == "qwen_image_lightning" else []
    job += "family.keep=3 family.compile=false reward=shapes data=shapes trainer=cpu ~logger iterations=1".split()
    job += ["family.explore.rungs.0.keep=4"] if family == "race" else []
    job += f"model.resolution=32 model.max_sequence_length={MAX_WORDS} prompts_per_iteration=2".split()
    job += "data.eval_prompts=2 data.eval_images=1 callbacks.sample_grid.every=0 evaluation.every=1".split()
    cfg = compose(*job, f"model.embeddings={tmp_path / 'embeddings'}")
    reward = train(cfg)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "completed" and reward == summary["final_reward"]
    assert cfg.model.full_steps == cfg.model.eval_steps == (8 if model == "z_image_turbo" else 4)
